"""The weights that a `ModelParallel` keeps in parts, over all devices."""

import dataclasses
import weakref
from collections.abc import Callable
from typing import Any

import keras

from keras_conflux._cluster.processes import process_count
from keras_conflux._common import notices
from keras_conflux._common.user_warnings import warn
from keras_conflux._compat import keras_models
from keras_conflux._replication import state

MEANING = (
    "`ModelParallel` stores split variables in parts, on all devices of "
    "the mesh. Each device gathers weights when it runs a layer, and computes "
    "its samples as a whole"
)

_told: Any = weakref.WeakSet()


@dataclasses.dataclass(frozen=True)
class SplitByLayout:
    """Tells of a weight whether its layout splits it."""

    distribution: keras.distribution.ModelParallel

    def __call__(self, weight: Any) -> bool:
        """Returns whether a layout names an axis of the mesh for a weight."""
        layout = self.distribution.get_tensor_layout(weight.path)
        if layout is None:
            return False
        rank = state.backing(weight).shape.rank
        if len(layout.axes) > rank:
            raise ValueError(
                f"The layout {layout.axes} has {len(layout.axes)} axes, and "
                f"{weight.path!r} has {rank}. Give its key in the `LayoutMap` "
                "one entry for each axis of the variable, which may be `None`."
            )
        return any(axis is not None for axis in layout.axes)


def assert_possible(distribution: keras.distribution.ModelParallel) -> None:
    """Raises in one of several processes, and tells once what is not split."""
    if process_count() > 1:
        raise NotImplementedError(
            f"`ModelParallel` works in one process, on the devices of one "
            f"host, in this version. There are {process_count()} processes. "
            f"Start one process, or use `keras.distribution.DataParallel()`. "
            f"Received: {distribution!r}."
        )
    if distribution not in _told:
        _told.add(distribution)
        notices.tell(
            f"{MEANING}, so activations are not split. Batches are, over "
            f"{distribution.device_mesh.devices.size} devices"
        )


def build(original: Callable, model: Any, **given: Any) -> None:
    """Warns of the keys of a `LayoutMap` that match no weight of a model."""
    original(model, **given)
    distribution = keras.distribution.distribution()
    if not (distribution and model.built and "iterator" in given):
        return
    paths = [weight.path for weight in model.weights]
    outputs = [f"{x.path}/output" for x in keras_models.all_layers(model)]
    for layouts in vars(distribution).values():
        if isinstance(layouts, keras.distribution.LayoutMap):
            used = {id(layouts[path]) for path in paths + outputs}
            if unused := [x for x in layouts if id(layouts[x]) not in used]:
                warn(
                    f"{model.name}: keys of the `LayoutMap` match no weight: "
                    f"{unused}. A key is a regular expression of the whole "
                    f"path of a weight, as these are: {paths[:20]}."
                )
