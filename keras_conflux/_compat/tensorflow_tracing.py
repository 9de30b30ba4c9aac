"""How TensorFlow traces functions, and where in a trace the caller is."""

import contextlib
import enum
import functools
import re
import sys
import threading
from collections.abc import Callable
from collections.abc import Iterator
from collections.abc import Sequence
from typing import Any

import tensorflow as tf
from tensorflow.python.eager import context
from tensorflow.python.eager import forwardprop_util
from tensorflow.python.eager import record
from tensorflow.python.ops import control_flow_util
from tensorflow.python.ops import control_flow_v2_func_graphs as func_graphs
from tensorflow.python.ops import script_ops
from tensorflow.python.ops import summary_ops_v2

from keras_conflux._common.contexts import having
from keras_conflux._graphs import bodies

_OFF = type(tf.compat.v1.GraphOptions().rewrite_options).OFF
_VECTORIZED = re.compile(r"(^|/)loop_body(_\d+)?(/|$)")
"""The name scope of loops that `pfor` vectorizes."""
_BRANCH_OR_LOOP = (
    func_graphs.CondBranchFuncGraph,
    func_graphs.WhileBodyFuncGraph,
    func_graphs.WhileCondFuncGraph,
)


def is_recorded(tensors: Sequence[Any]) -> bool:
    """Whether a gradient tape records computations with one of these."""
    return record.should_record_backprop(tensors)


def has_tangents(tensors: Sequence[Any]) -> bool:
    """Whether a `tf.autodiff.ForwardAccumulator` follows one of these."""
    return bool(forwardprop_util.pack_tangents(list(tensors)).tangents)


def in_replica_loop() -> bool:
    """Whether a `tf.while_loop` or the like in the running replica is traced.

    TensorFlow tells collectives of one step apart by the loop they are in. Each
    replica has its own copy of the loop, so they would wait for each other
    forever. A loop around `strategy.run` is fine.
    """
    return _is_in(func_graphs.WhileBodyFuncGraph)


def in_branch_or_loop() -> bool:
    """Whether a branch or a loop inside the running replica is being traced."""
    return _is_in(_BRANCH_OR_LOOP)


def is_vectorized() -> bool:
    """Whether a loop is being traced that is run for all turns at once."""
    return bool(_VECTORIZED.search(tf.get_current_name_scope()))


def in_compiled_function() -> bool:
    """Whether the current graph is in a function that XLA compiles."""
    graph = tf.compat.v1.get_default_graph()
    return control_flow_util.GraphOrParentsInXlaContext(graph)


def _is_in(kinds: Any) -> bool:
    """Whether the replica's program has opened a graph of some kinds."""
    # `graph` is where the replica's program is traced to; the graphs between
    # the current one and it were opened by the program.
    thread = threading.current_thread()
    replica = tf.distribute.get_replica_context()
    replica_graph = getattr(replica, "graph", getattr(thread, "graph", None))
    for graph in bodies.being_traced():
        if graph is replica_graph:
            break
        if isinstance(graph, kinds):
            return True
    return is_vectorized()


def may_run_in_another_thread() -> bool:
    """Whether a function that is called here is a step by itself.

    Not if a graph or a tape takes it up, or Python runs its operations.
    """
    return (
        tf.executing_eagerly()
        and not tf.config.functions_run_eagerly()
        and not record.could_possibly_record()
    )


_OF_RANK = "conflux_of_rank"


def of_rank() -> contextlib.AbstractContextManager[Any]:
    """Marks operations traced inside: they may differ with the rank.

    Processes compare all others that they trace. Only a tensor that is made
    inside may leave it, on each replica.
    """
    return tf.name_scope(_OF_RANK)


def note_rank() -> None:
    """Notes that a program has asked for its rank, if not inside `of_rank`."""
    if is_of_rank(f"{tf.get_current_name_scope()}/"):
        return
    for graph in bodies.being_traced():
        graph.conflux_ranks = ranks_asked_in(graph) + 1


def ranks_asked_in(graph: Any) -> int:
    """Returns how often `note_rank` has noted something in a graph."""
    return getattr(graph, "conflux_ranks", 0)


def is_of_rank(name: str) -> bool:
    """Whether an operation of a name was traced inside of `of_rank`."""
    return f"{_OF_RANK}/" in name or f"{_OF_RANK}_" in name


class Grappler(enum.Enum):
    """The passes that TensorFlow's optimizer of graphs leaves out.

    It multiplies and adds in another order where that is cheaper. Whether it is
    depends on devices, and on a number's other uses, and so on the replica.
    """

    NOTHING = ()
    ORDERS = (("arithmetic_optimization", _OFF), ("constant_folding", _OFF))
    ALL = (("disable_meta_optimizer", True),)


def concrete_function(
    function: Callable, signature: Any, leaves_out: Grappler = Grappler.NOTHING
) -> Callable:
    """Returns `function` as a graph, with its control flow as it is.

    It is traced in the thread of the caller. In XLA programs, all passes of
    Grappler take long and gain nothing.
    """
    traced = without_retracing_warning(
        tf.function(function, input_signature=signature, autograph=False)
    )
    if tf.config.functions_run_eagerly():
        return traced
    # Calling the `tf.function` would hash all variables of all replicas.
    concrete = traced.get_concrete_function()

    @functools.wraps(function)
    def call(*arguments: Any) -> Any:
        if tf.config.functions_run_eagerly():
            return traced(*arguments)
        with leaving_out(leaves_out):
            return concrete(*arguments)

    call.graph = concrete.graph
    return call


@functools.cache
def _without(leaves_out: Grappler, executor: Any, serialized: bytes) -> Any:
    """Returns the options of a call, without something of Grappler's."""
    config = tf.compat.v1.ConfigProto.FromString(serialized)
    rewrites = config.graph_options.rewrite_options
    for option, value in leaves_out.value:
        setattr(rewrites, option, value)
    return context.FunctionCallOptions(executor, config)


def leaving_out(passes: Grappler) -> contextlib.AbstractContextManager[None]:
    """Has Grappler leave passes out in graphs that this thread runs."""
    if passes is Grappler.NOTHING:
        return contextlib.nullcontext()
    here: Any = context.context()
    old = here.function_call_options
    options = _without(passes, old.executor_type, old.config_proto_serialized)
    return having(here, function_call_options=options)


def traces_of(function: Any) -> list[Any]:
    """Returns the graphs that have been traced of a function."""
    graph = getattr(function, "graph", None)
    if graph is not None:
        return [graph]
    # The method that lists them would trace for an input signature.
    cache = getattr(function, "_function_cache", None)
    return [] if cache is None else [each.graph for each in cache.values()]


def in_python_op_of(program: Any) -> bool:
    """Whether this thread runs a `tf.py_function`, or its kin, of a program."""
    graph = getattr(program, "graph", None)
    token = _token_of_python_op()
    if graph is None or token is None:
        return False
    definition = graph.as_graph_def()
    bodies = [function.node_def for function in definition.library.function]
    return any(
        node.attr["token"].s == token
        for nodes in (definition.node, *bodies)
        for node in nodes
        if "token" in node.attr
    )


def _token_of_python_op() -> bytes | None:
    """Returns the name of the Python function that TensorFlow runs here."""
    frame = sys._getframe()
    while frame is not None:
        if frame.f_code is script_ops.FuncRegistry.__call__.__code__:
            token = frame.f_locals["token"]
            return token if isinstance(token, bytes) else token.encode()
        frame = frame.f_back
    return None


@contextlib.contextmanager
def noting_new_variables() -> Iterator[list[str]]:
    """Notes the names of variables that are made in the current graph."""
    made: list[str] = []

    def note(next_creator: Callable, **kwargs: Any) -> tf.Variable:
        made.append(str(kwargs.get("name")))
        return next_creator(**kwargs)

    with tf.variable_creator_scope(note):
        yield made


def without_retracing_warning(function: Any) -> Any:
    """Keeps a `tf.function` from warning that it is traced often.

    TensorFlow counts tracings by the line of the source. That is one for all
    models and all steps of a program, each of which is traced for itself.
    """
    # polymorphic_function.py, in `__call__`.
    function._omit_frequent_tracing_warning = True
    return function


def untraced(function: Any) -> Any:
    """Returns the same `tf.function`, as if it had not been called yet."""
    return without_retracing_warning(function._clone(None))


def with_this_threads_summaries(fn: Callable) -> Callable:
    """Makes `tf.summary` in `fn` write where it would in this thread."""
    # Writer, step and condition are kept by thread; mirrored_run.py hands
    # them on to the threads of replicas in the same way.
    here = dict(vars(summary_ops_v2._summary_state))

    def run() -> Any:
        vars(summary_ops_v2._summary_state).update(here)
        return fn()

    return run


def inlined(function: Callable) -> Callable:
    """Returns the Python function of a `tf.function`, to be traced again."""
    inside = getattr(function, "python_function", None)
    if inside is None:
        return function
    autograph: Any = tf.__internal__.autograph
    owner = getattr(function, "__self__", None)
    converted = autograph.tf_convert(inside, autograph.control_status_ctx())
    if owner is None:
        return converted
    return functools.partial(converted, owner)
