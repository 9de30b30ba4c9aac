"""Tells the relation of a traced step's tensors to its samples.

This is a library of its own. It reads a graph of TensorFlow and runs nothing
on replicas: neither the core nor an extension is imported here, and they import
the names below, alone, beside `_graphs`. `docs/design/batch-analysis.md` can
be read in place of the code, and lists the questions that it answers.
"""

from keras_conflux._batch_analysis.analysis import (
    KindInference as KindInference,
)
from keras_conflux._batch_analysis.analysis import parts_of as parts_of
from keras_conflux._batch_analysis.blocks import (
    are_of_a_sample as are_of_a_sample,
)
from keras_conflux._batch_analysis.blocks import counted_rows as counted_rows
from keras_conflux._batch_analysis.blocks import split_blocks as split_blocks
from keras_conflux._batch_analysis.derivation import Derivation as Derivation
from keras_conflux._batch_analysis.derivation import (
    NotDerivable as NotDerivable,
)
from keras_conflux._batch_analysis.derivation import (
    derivation_of as derivation_of,
)
from keras_conflux._batch_analysis.drawn import DRAWING as DRAWING
from keras_conflux._batch_analysis.kinds import COUNT as COUNT
from keras_conflux._batch_analysis.kinds import COUNTED as COUNTED
from keras_conflux._batch_analysis.kinds import DERIVED as DERIVED
from keras_conflux._batch_analysis.kinds import EQUAL as EQUAL
from keras_conflux._batch_analysis.kinds import MEAN as MEAN
from keras_conflux._batch_analysis.kinds import OPAQUE as OPAQUE
from keras_conflux._batch_analysis.kinds import TOTAL as TOTAL
from keras_conflux._batch_analysis.kinds import Entries as Entries
from keras_conflux._batch_analysis.kinds import Kind as Kind
from keras_conflux._batch_analysis.kinds import Role as Role
from keras_conflux._batch_analysis.kinds import combined as combined
from keras_conflux._batch_analysis.kinds import kind_of_filled as kind_of_filled
from keras_conflux._batch_analysis.kinds import mixed_rows as mixed_rows
from keras_conflux._batch_analysis.kinds import rows as rows
from keras_conflux._batch_analysis.own_draws import (
    draws_shared_by_samples as draws_shared_by_samples,
)
from keras_conflux._batch_analysis.own_gradients import (
    OwnGradients as OwnGradients,
)
from keras_conflux._batch_analysis.rules import CODE as CODE
from keras_conflux._batch_analysis.rules import (
    sources_of_entries as sources_of_entries,
)
from keras_conflux._batch_analysis.trial import kind_by_trial as kind_by_trial
from keras_conflux._batch_analysis.trial import rows_by_trial as rows_by_trial
from keras_conflux._batch_analysis.trial import uses as uses
