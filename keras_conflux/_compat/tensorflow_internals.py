"""Accessors of the private names that `private_tensorflow_names` lists."""

import contextlib
import functools
import gc
import re
import sys
import threading
from collections.abc import Callable
from collections.abc import Collection
from collections.abc import Iterator
from collections.abc import Sequence
from typing import Any

import tensorflow as tf

# tf.raw_ops leaves out the ops that gen_xla_ops has.
from tensorflow.compiler.tf2xla.ops import gen_xla_ops
from tensorflow.python.client import device_lib
from tensorflow.python.distribute import mirrored_run
from tensorflow.python.distribute import values_util
from tensorflow.python.eager import context
from tensorflow.python.eager import forwardprop_util
from tensorflow.python.eager import record
from tensorflow.python.framework import auto_control_deps_utils
from tensorflow.python.framework import config
from tensorflow.python.ops import control_flow_v2_func_graphs as func_graphs
from tensorflow.python.ops import handle_data_util
from tensorflow.python.ops import resource_variable_ops
from tensorflow.python.ops import script_ops
from tensorflow.python.ops import summary_ops_v2

from keras_conflux._common.version_numbers import numbers
from keras_conflux._compat import private_tensorflow_names

_VECTORIZED = re.compile(r"(^|/)loop_body(_\d+)?(/|$)")
"""The name scope of what `pfor` vectorizes."""


def in_replica_loop() -> bool:
    """Whether a loop inside the running replica is being traced.

    That is a `tf.while_loop`, or what `tf.vectorized_map` runs for each row.

    TensorFlow tells collectives of one step apart by the loop they are in.
    Each replica has its own copy of the loop, so they would wait for each
    other forever. A loop around `strategy.run` is fine.
    """
    return _is_vectorized() or any(
        isinstance(graph, func_graphs.WhileBodyFuncGraph)
        for graph in _graphs_inside_replica()
    )


def in_branch_or_loop() -> bool:
    """Whether a branch or a loop inside the running replica is being traced."""
    kinds = (
        func_graphs.CondBranchFuncGraph,
        func_graphs.WhileBodyFuncGraph,
        func_graphs.WhileCondFuncGraph,
    )
    return _is_vectorized() or any(
        isinstance(graph, kinds) for graph in _graphs_inside_replica()
    )


def _is_vectorized() -> bool:
    return bool(_VECTORIZED.search(tf.get_current_name_scope()))


def _graphs_inside_replica() -> Iterator[Any]:
    """Yields the graphs that the replica's program has opened."""
    # `graph` is where the replica's program is traced to; what lies between
    # the current graph and that one was opened by the program.
    thread = threading.current_thread()
    replica = tf.distribute.get_replica_context()
    replica_graph = getattr(replica, "graph", getattr(thread, "graph", None))
    graph = tf.compat.v1.get_default_graph()
    while graph is not None and graph is not replica_graph:
        yield graph
        graph = getattr(graph, "outer_graph", None)


def has_started() -> bool:
    """Whether TensorFlow has taken its devices and their settings are fixed."""
    # Everything in tf.config that could tell starts it.
    running: Any = context.context()
    return running._initialized


def has_listed_devices() -> bool:
    """Whether TensorFlow has looked for devices, and has read its flags."""
    running: Any = context.context()
    return running._physical_devices is not None


@functools.cache
def memory_of(device: str) -> int:
    """Returns how many bytes TensorFlow may take of a device's memory."""
    # tf.config tells only what is in use. Without the running configuration
    # this would make devices of all GPUs, also of those that are hidden.
    running: Any = context.context()
    for found in device_lib.list_local_devices(running.config):
        if found.name.endswith(f":{device}"):
            return found.memory_limit
    return 0


def concrete_function(function: Callable, signature: Any) -> Callable:
    """Returns `function` as a graph, with its control flow as it is.

    It is traced in the thread of the caller.
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
        eager = tf.config.functions_run_eagerly()
        return (traced if eager else concrete)(*arguments)

    call.graph = concrete.graph
    return call


def traces_of(function: Any) -> list[Any]:
    """Returns the graphs that have been traced of a function.

    Args:
        function: What `concrete_function` has returned, or a `tf.function`.
    """
    graph = getattr(function, "graph", None)
    if graph is not None:
        return [graph]
    # The method that lists them would trace for an input signature.
    cache = getattr(function, "_function_cache", None)
    return [] if cache is None else [each.graph for each in cache.values()]


def in_python_op_of(program: Any) -> bool:
    """Whether this thread runs a `tf.py_function`, or its kin, of a program.

    Args:
        program: A traced function.
    """
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


def is_cancellation(error: BaseException) -> bool:
    """Whether a replica was stopped because of what went wrong elsewhere."""
    # Raised in the threads of replicas that wait in `merge_call`.
    return isinstance(error, mirrored_run._RequestedStop)


def with_this_threads_summaries(fn: Callable) -> Callable:
    """Makes `tf.summary` in `fn` write where it would in this thread."""
    # Writer, step and condition are kept by thread; mirrored_run.py hands
    # them on to the threads of replicas in the same way.
    here = dict(vars(summary_ops_v2._summary_state))

    @functools.wraps(fn)
    def run() -> Any:
        vars(summary_ops_v2._summary_state).update(here)
        return fn()

    return run


def xla_all_reduce(tensor: tf.Tensor, count: int, op: str) -> tf.Tensor:
    """All-reduces inside an XLA program that runs on `count` devices.

    Args:
        tensor: float16, bfloat16, float32 or int32.
        count: How many devices.
        op: `"Add"`, `"Mul"`, `"Min"` or `"Max"`.
    """
    # The mode "CrossReplica" gives each replica back its own tensor, as
    # TensorFlow compiles a program for each.
    reduced = gen_xla_ops.xla_all_reduce(
        tensor, [list(range(count))], op, "CrossReplicaAndPartition"
    )
    must_run(reduced)
    return reduced


def has_module_calls() -> bool:
    """Whether XLA programs can have parts that are written in StableHLO."""
    return numbers(tf.__version__) >= private_tensorflow_names.MODULE_CALLS


def module_call(
    module: str,
    operands: list[tf.Tensor],
    shapes: Any,
    dtypes: list[tf.DType],
    platform: str,
) -> list[tf.Tensor]:
    """Returns what a StableHLO module computes, inside an XLA program.

    Args:
        module: Its text. Its function `main` takes the operands.
        operands: Of the shapes that `main` declares.
        shapes: Of the results.
        dtypes: Of the results.
        platform: What XLA calls the devices that the program runs on.
    """
    from tensorflow.compiler.mlir.stablehlo import stablehlo

    serialized = stablehlo.serialize_portable_artifact_str(
        module, stablehlo.get_current_version()
    )
    found: Any = gen_xla_ops.xla_call_module(
        operands,
        version=9,
        module=serialized,
        Sout=shapes,
        Tout=dtypes,
        platforms=[platform],
    )
    return list(found)


def copy_handle_data(source: tf.Tensor, target: tf.Tensor) -> None:
    """Lets shape functions know what lies behind a handle, as behind another.

    Args:
        source: The handle of a variable, for example.
        target: A placeholder for it.
    """
    handle_data_util.copy_handle_data(source, target)


def is_recorded(tensors: Sequence[tf.Tensor]) -> bool:
    """Whether a gradient tape records what is computed of one of these."""
    return record.should_record_backprop(tensors)


def has_tangents(tensors: Sequence[tf.Tensor]) -> bool:
    """Whether a `tf.autodiff.ForwardAccumulator` follows one of these."""
    return bool(forwardprop_util.pack_tangents(list(tensors)).tangents)


def is_deterministic() -> bool:
    """Whether the user has enabled op determinism."""
    return config.is_op_determinism_enabled()


def must_run(tensor: tf.Tensor) -> None:
    """Keeps the op of `tensor` in the graph even if nothing uses its result."""
    # auto_control_deps.py leaves NcclAllReduce out of the ops that must run
    # (ASYNC_STATEFUL_OPS), and XlaAllReduce is not stateful. If one replica
    # ignored the result, its op would be pruned, and the others would wait for
    # it forever.
    tensor.graph.control_outputs.append(tensor.op)


def uses_of(variable: tf.Variable) -> list[tf.Operation]:
    """Returns what uses a variable in the graph that is being traced."""
    # A graph knows a variable by a placeholder for its handle, which
    # FuncGraph.capture makes at the first use and finds again.
    graph: Any = tf.compat.v1.get_default_graph()
    return graph.capture(variable.handle).consumers()


def keep_identity(old: tf.Variable, new: tf.Variable) -> None:
    """Makes dictionaries that know `old` by its key find `new` under it."""
    # Keras' optimizers index their state by `_unique_id`
    # (backend/tensorflow/optimizer.py, `_var_key`). A mirrored variable takes
    # the id of its first copy.
    new._unique_id = old._unique_id


def captures(graph: Any) -> dict[int, Any]:
    """Returns what a graph takes from outside, by the ids of placeholders."""
    pairs = getattr(graph, "captures", ())
    return {id(inside): outside for outside, inside in pairs}


def outermost(tensor: Any, graph: Any) -> Any:
    """Returns what a placeholder stands for outside of all graphs.

    Args:
        tensor: The placeholder, or any other tensor, which is returned.
        graph: The graph that has it.
    """
    while graph is not None:
        outside = captures(graph).get(id(tensor))
        if outside is None:
            break
        tensor, graph = outside, getattr(outside, "graph", None)
        if is_eager(tensor):
            break
    return tensor


def uses_of_resources(graph: Any) -> Iterator[tuple[Any, list[tf.Operation]]]:
    """Yields what a graph uses and may change, such as a variable's handle.

    Yields:
        The resource, as known outside of all graphs, and the operations of
        the graph that use it.
    """
    for placeholder in list(getattr(graph, "internal_captures", ())):
        if placeholder.dtype == tf.resource:
            yield outermost(placeholder, graph), placeholder.consumers()


def in_order(
    operations: Collection[tf.Operation], graph: Any
) -> list[tf.Operation]:
    """Returns operations of a graph in the order in which they were traced."""
    order = {op.name: place for place, op in enumerate(graph.get_operations())}
    return sorted(operations, key=lambda operation: order[operation.name])


def changes(operation: tf.Operation, handle: Any, graph: Any) -> bool:
    """Whether an operation may change a resource that it uses.

    A branch, a loop or a function may if anything in it does.

    Args:
        operation: Of `graph`.
        handle: The resource, as known outside of all graphs.
        graph: Where the operation is.
    """
    find: Callable = auto_control_deps_utils.get_read_write_resource_inputs
    _, changed = find(operation)
    return any(outermost(tensor, graph) is handle for tensor in changed)


def variables_behind(handles: Collection[Any]) -> dict[int, Any]:
    """Returns, by the ids of handles, the variables that have them.

    A variable with a copy for each device has several. A handle does not know
    its variable, so this looks at all objects of the program.
    """
    wanted = {id(handle) for handle in handles}
    found: dict[int, Any] = {}
    for each in gc.get_objects() if wanted else ():
        kind = type(each)
        if tf.Variable not in kind.__mro__:
            continue
        if isinstance(each, tf.distribute.DistributedValues):
            copies = each.values
            found.update((id(copy.handle), each) for copy in copies)
        elif kind is not resource_variable_ops._UnreadVariable:
            found.setdefault(id(each.handle), each)
    return {key: each for key, each in found.items() if key in wanted}


def is_eager(tensor: Any) -> bool:
    """Whether a tensor has a value, and is not one of a graph."""
    return isinstance(tensor, tf.__internal__.EagerTensor)


def function_named(graph: Any, name: str) -> Any:
    """Returns the graph of a function that a graph calls, if it is known."""
    return getattr(graph._get_function(name), "graph", None)


def graphs_of(operation: tf.Operation) -> list[Any]:
    """Returns the graphs that an operation runs, as both of a branch."""
    functions = [
        each.func.name
        for each in operation.node_def.attr.values()
        if each.HasField("func")
    ]
    return [function_named(operation.graph, name) for name in functions]


def results_inside(tensor: tf.Tensor) -> list[tf.Tensor]:
    """Returns what a tensor is in the functions that its operation runs."""
    bodies = [body for body in graphs_of(tensor.op) if body is not None]
    place = tensor.value_index
    return [body.outputs[place] for body in bodies if place < len(body.outputs)]


def copied(operation: tf.Operation, inputs: list[tf.Tensor]) -> list[tf.Tensor]:
    """Returns what an operation gives for other inputs.

    It is put into the current graph once more. A function and a conditional
    are traced once more, as TensorFlow could not differentiate their copies.
    """
    if operation.type == "PartitionedCall":
        return _called(operation, "f", inputs)
    if operation.type == "StatelessIf":
        return tf.nest.flatten(
            tf.cond(
                tf.cast(inputs[0], tf.bool),
                lambda: _called(operation, "then_branch", inputs[1:]),
                lambda: _called(operation, "else_branch", inputs[1:]),
            )
        )
    definition = operation.node_def
    copy = tf.compat.v1.get_default_graph().create_op(
        operation.type,
        inputs,
        [output.dtype for output in operation.outputs],
        attrs={k: v for k, v in definition.attr.items() if k != "_class"},
        op_def=operation.op_def,
    )
    return list(copy.outputs)


def _called(
    operation: tf.Operation, attribute: str, inputs: list[tf.Tensor]
) -> list[tf.Tensor]:
    """Returns what a function that an operation calls gives for inputs."""
    name = operation.node_def.attr[attribute].func.name
    body = function_named(operation.graph, name)
    known = {
        placeholder.name: tensor
        for placeholder, tensor in zip(body.inputs, inputs, strict=True)
    }
    for inner in body.get_operations():
        if inner.type == "Placeholder":
            continue
        values = copied(inner, [known[x.name] for x in inner.inputs])
        for old, new in zip(inner.outputs, values, strict=True):
            known[old.name] = new
    # To the graph, TensorFlow adds what it needs for derivatives.
    outputs = body.outputs[: len(operation.outputs)]
    return [known[x.name] for x in outputs]


def replica_index() -> int:
    """Returns the index of the running replica in this process.

    `replica_id_in_sync_group` would add a constant to the graph at each call.
    """
    found: Any = values_util.get_current_replica_id_as_int()
    return found


def handle_of(variable: tf.Variable) -> Any:
    """Returns by what graphs know a variable."""
    return variable.handle


def inlined(function: Callable) -> Callable:
    """Returns what a `tf.function` runs, to be traced into another graph."""
    inside = getattr(function, "python_function", None)
    if inside is None:
        return function
    autograph: Any = tf.__internal__.autograph
    context = autograph.control_status_ctx()
    owner = getattr(function, "__self__", None)
    converted = autograph.tf_convert(inside, context)
    if owner is None:
        return converted
    return functools.partial(converted, owner)


def copy_that_is_read(variable: Any) -> tf.Variable:
    """Returns the copy of a mirrored variable that is read here.

    In a replica it is the replica's, elsewhere that of the current device, or
    the first.
    """
    return variable._get_on_device_or_primary()


def eager_seed_state() -> Any:
    """Returns where the generator stands that seeds eager random operations.

    `None` if TensorFlow was given no seed.
    """
    generator = getattr(context.context(), "_rng", None)
    return None if generator is None else generator.getstate()


def set_eager_seed_state(saved: Any) -> None:
    """Puts that generator where it stood, if TensorFlow was given a seed."""
    generator = getattr(context.context(), "_rng", None)
    if saved is not None and generator is not None:
        generator.setstate(saved)


def datasets_below(dataset: tf.data.Dataset) -> Iterator[tf.data.Dataset]:
    """Yields a data set and those that it is made of."""
    yield dataset
    for each in dataset._inputs():
        yield from datasets_below(each)


def seeds_of_dataset(dataset: tf.data.Dataset) -> tuple[int, int] | None:
    """Returns the seeds that a data set shuffles or draws by, if it does."""
    seeds = [getattr(dataset, name, None) for name in ("_seed", "_seed2")]
    if any(seed is None for seed in seeds):
        return None
    return int(tf.get_static_value(seeds[0])), int(
        tf.get_static_value(seeds[1])
    )


def is_out_of_order(dataset: tf.data.Dataset) -> bool:
    """Whether a data set yields what is ready first."""
    return getattr(dataset, "_deterministic", None) == "false"


def operations_of_dataset(dataset: tf.data.Dataset) -> list[tf.Operation]:
    """Returns the operations of the function that a data set maps by."""
    mapped = getattr(dataset, "_map_func", None)
    return [] if mapped is None else mapped.function.graph.get_operations()
