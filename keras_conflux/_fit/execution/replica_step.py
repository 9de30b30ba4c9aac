"""The step of each replica on its shard of a batch, and the common result."""

import threading
from collections.abc import Callable
from typing import Any

import keras
import tensorflow as tf

from keras_conflux._batch_analysis import KindInference
from keras_conflux._cluster.processes import process_count
from keras_conflux._common import trees
from keras_conflux._common.trees import Tree
from keras_conflux._common.user_warnings import warn
from keras_conflux._compat import tensorflow_tracing
from keras_conflux._compat.tensorflow_internals import replica_index
from keras_conflux._fit.execution.microbatches import TracedTurns
from keras_conflux._fit.execution.microbatches import run_in_turns
from keras_conflux._fit.input import specs
from keras_conflux._fit.numerics.choices import Choices
from keras_conflux._fit.numerics.draws import Draws
from keras_conflux._fit.numerics.exit import Exit
from keras_conflux._fit.numerics.exit import TraceAgain
from keras_conflux._fit.numerics.exit import TraceFindings
from keras_conflux._fit.numerics.gradients import Gradients
from keras_conflux._fit.numerics.returns import Logs
from keras_conflux._fit.numerics.returns import Predictions
from keras_conflux._fit.numerics.returns import Returns
from keras_conflux._fit.numerics.warnings import plain_variables
from keras_conflux._fit.numerics.warnings import warn_of_plain_variables
from keras_conflux._fit.numerics.writes import Writes
from keras_conflux._graphs import resources
from keras_conflux._replication import common_program
from keras_conflux._replication import common_state
from keras_conflux._replication import state
from keras_conflux._replication import steps
from keras_conflux._replication import sums


class ReplicaStep:
    """A step of a model on each replica. It makes the values global that leave.

    `on_whole_batch` runs the step of one device, which needs none of this.
    """

    returns: type[Returns]
    """The way out of its results."""
    of = "fit or evaluate"
    """The methods of a model that run it."""
    runs_in_turns = True
    """Whether a replica may run its part of a batch in turns."""

    def __init__(self, model: keras.Model, on_whole_batch: Callable) -> None:
        self.on_whole_batch = on_whole_batch
        self.name = model.name
        """The name of the step in warnings."""
        self.identity = f"{type(self).__name__} of {model.name}"
        """A text that is the same in each process that makes the same step."""
        self.made: list[str] = []
        """Variables that a trace has made. TensorFlow then traces it again."""
        self.turns = 1
        """In how many parts a replica runs its part of a batch."""
        self.tracing = threading.RLock()
        """Held by the thread that traces the step. Others may ask at once, as
        when each replica of another model wants predictions."""
        self._model = model
        self._steps: dict[int, steps.Step] = {}
        self._programs: dict[int, common_program.CommonProgram] = {}
        """The traces of this process' replicas."""
        self._plain_variables: list[tuple[Any, bool]] = []
        """The variables that the last trace reads and the model does not know,
        and whether it writes them, too."""
        self._common_variables: list[tuple[Any, bool]] = []
        """The variables of traces that all processes have."""
        self._warned: set[str] = set()
        self._drawn_by_sample: frozenset[int] = frozenset()

    def _run(self, shard: Tree, step: steps.Step) -> Tree:
        """Runs the step of the model in a replica."""
        raise NotImplementedError

    def on_replica(self, *given: Any) -> Tree:
        """Runs a replica's step, in turns if there are several; see `_trace`.

        Traced once per replica, in replica order, or once for all by XLA.
        """
        if self.turns == 1:
            return self._trace(*given)
        return run_in_turns(self.name, self.turns, self._trace, *given)

    def _trace(
        self,
        shard: Tree,
        fraction: Any,
        place: Callable[[], steps.Place],
        size: Any,
        compiled: steps.CompiledStep | None = None,
        turns: TracedTurns | None = None,
    ) -> Tree:
        """Traces a step, of a replica or of one of its turns.

        The fraction is the shard's number of samples over the global batch's.
        The size is this number, which may be 0; `None` if it cannot.
        """
        model = self._model
        fraction = tf.identity(fraction)  # a tensor of the step's own graph
        step = steps.Step(
            self.name,
            warned=self._warned,
            compiled=compiled,
            batch_fraction=fraction,
            place=place,
            may_be_empty=size is not None,
            shard=shard,
            graph=tf.compat.v1.get_default_graph(),
            kinds=KindInference(
                trees.present(shard),
                [fraction] if size is None else [fraction, size],
                lambda handle: state.is_sum(resources.container_of(handle)),
                is_blind=specs.sizes_are_known(shard),
            ),
            model=model,
            turns=turns,
        )
        if turns is not None:  # as a rank of Python's is
            step.kinds.mark_equal([turns.rank])
        if replica_index() == 0:
            self._steps.clear()  # replicas may share this trace
            self._programs.clear()
        self._steps[replica_index()] = step
        with steps.entered(step):
            Draws.of(step).by_sample = self._drawn_by_sample
            program = common_program.CommonProgram(shard)
            output = self._run(shard, step)
            program.close()
            self._programs[replica_index()] = program
            if replica_index() == 0 and process_count() > 1:
                self._plain_variables = [
                    (v, bool(writes)) for v, writes in plain_variables(step)
                ]
            if not self.made:
                # Others would read what this one has written to a single copy.
                Writes.of(step).assert_tracked()
            for each in self._exits(step):
                output = each.end(output)
            if not self.made:
                warn_of_plain_variables(step)
            steps.finish()
        step.turns = None  # operations traced after steps run once
        return output

    def after_steps(self) -> None:
        """Gives all processes the sums of metrics, once after many steps."""
        if process_count() > 1:
            with steps.entered(self._steps[replica_index()]):
                sums.add_up(sums.written_here())

    def raise_if_retrace_needed(self) -> None:
        """Raises `TraceAgain` if the traces of all replicas were in vain."""
        findings = TraceFindings()
        for step in self._steps.values():
            for each in self._exits(step):
                each.report(findings)
        self._drawn_by_sample |= findings.by_sample
        if findings != TraceFindings():
            raise TraceAgain(findings)
        # Replicas of a compiled step share a trace. Where they cannot, kernels
        # may differ by the known shapes of shards.
        if all(step.compiled is None for step in self._steps.values()):
            common_program.assert_alike([*self._programs.values()], self.name)

    def warn_of_merged(self) -> None:
        """Warns where `merge_call` sees a replica that has no samples."""
        merged = any(step.kinds.merged for step in self._steps.values())
        if merged and "merged" not in self._warned:
            self._warned.add("merged")
            warn(
                f"{self.name}: a batch has fewer samples than there are "
                "replicas. The others run on a copy of a sample, which "
                "TensorFlow's `merge_call` and `all_gather` count. Write "
                "`keras_conflux.allreduce` or `keras_conflux.allgather`."
            )

    def merge(self, outputs: list[Tree], fractions: list, sizes: list) -> Tree:
        """Makes one result of the replicas' results."""
        return self.returns.of(self._steps[0]).merged(outputs, fractions, sizes)

    def agree(self) -> None:
        """Raises unless all processes have traced the same."""
        program = self._programs.pop(0, None)
        self._programs.clear()
        if program is not None and process_count() > 1:
            program.agree(f"the first run of {self.identity}")
            self._common_variables += self._plain_variables
            common_state.compare_too(
                self._model, self.identity, self._common_variables
            )

    def _exits(self, step: steps.Step) -> list[Exit]:
        """Returns the ways out of a step, in the order in which they end."""
        exits = (Gradients, self.returns, Writes, Choices, Draws)
        return [each.of(step) for each in exits]


class TrainOrTestStep(ReplicaStep):
    """A `train_step` or `test_step`, whose result is the logs."""

    returns = Logs

    def __init__(self, model: keras.Model, step: Callable) -> None:
        super().__init__(model, step)
        self.identity += f": {getattr(step, '__name__', '')}"
        self._of_model = tensorflow_tracing.inlined(step)

    def _run(self, shard: Tree, step: steps.Step) -> Tree:
        with Logs.of(step).noting_results():
            return self._of_model(shard)


class PredictStep(ReplicaStep):
    """A `predict_step`, whose result is the outputs for the global batch."""

    returns = Predictions
    of = "predict"
    runs_in_turns = False  # without gradients, little is kept

    def __init__(self, model: keras.Model, is_local: bool = False) -> None:
        super().__init__(model, lambda batch: model.predict_step(batch))
        self._is_local = is_local

    def _run(self, shard: Tree, step: steps.Step) -> Tree:
        Predictions.of(step).is_local = self._is_local
        return self._model.predict_step(shard)
