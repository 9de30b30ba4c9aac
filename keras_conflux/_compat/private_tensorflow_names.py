"""Every name inside of TensorFlow that the package overrides or reads.

Read in TensorFlow 2.20.0 and 2.21.0.
"""

from keras_conflux._compat.private_names import PrivateName

_DISTRIBUTE = "tensorflow.python.distribute"
_EXTENDED = f"{_DISTRIBUTE}.mirrored_strategy:MirroredExtended"
_GRAPH = "tensorflow.python.framework.func_graph:FuncGraph"
_FUNCTION = (
    "tensorflow.python.eager.polymorphic_function.polymorphic_function:Function"
)
_ORDER = (
    "tensorflow.python.framework.auto_control_deps:AutomaticControlDependencies"
)

OVERRIDDEN = (
    PrivateName(
        f"{_EXTENDED}.__init__",
        "self, container_strategy, devices, cross_device_ops",
    ),
    PrivateName(f"{_EXTENDED}._use_merge_call", "self"),
    PrivateName(f"{_EXTENDED}._make_collective_ops_with_fallbacks", "self"),
    PrivateName(f"{_EXTENDED}._get_cross_device_ops", "self, value"),
    PrivateName(f"{_EXTENDED}._create_variable", "self, next_creator, kwargs"),
    PrivateName(
        f"{_EXTENDED}._replica_ctx_all_reduce",
        "self, reduce_op, value, options",
    ),
    PrivateName(
        f"{_EXTENDED}._call_for_each_replica", "self, fn, args, kwargs"
    ),
)
"""The methods that `ReplicatedExtended` overrides."""

READ = (
    PrivateName(f"{_DISTRIBUTE}.mirrored_run:_RequestedStop"),
    PrivateName(f"{_DISTRIBUTE}.mirrored_run:_MirroredReplicaThread.run"),
    PrivateName("tensorflow.python.eager.context:context", ""),
    PrivateName(
        "tensorflow.python.eager.context:Context.ensure_initialized",
        None,
        ("_initialized",),
    ),
    PrivateName("tensorflow.python.eager.context:Context.config"),
    PrivateName(
        "tensorflow.python.client.device_lib:list_local_devices",
        "session_config",
    ),
    PrivateName(f"{_FUNCTION}._clone", "self, python_function"),
    PrivateName(
        f"{_FUNCTION}.__call__", None, ("_omit_frequent_tracing_warning",)
    ),
    PrivateName(f"{_GRAPH}.capture", "self, tensor, name, shape"),
    PrivateName(f"{_GRAPH}.__init__", None, ("control_outputs", "outer_graph")),
    PrivateName(f"{_ORDER}.__enter__", None, ("experimental_acd_manager",)),
    PrivateName(f"{_ORDER}.run_independently", "self, op"),
    PrivateName(
        f"{_ORDER}.__exit__",
        None,
        ("_control_flow_context", "_get_resource_inputs"),
    ),
    PrivateName(
        "tensorflow.python.framework.auto_control_deps:op_is_stateful", "op"
    ),
    PrivateName(
        "tensorflow.python.framework.auto_control_deps:_get_resource_inputs",
        "op",
    ),
    PrivateName("tensorflow.python.framework.ops:Operation._add_control_input"),
    PrivateName(
        "tensorflow.python.ops.control_flow_v2_func_graphs:WhileBodyFuncGraph"
    ),
    PrivateName("tensorflow.python.ops.summary_ops_v2:_summary_state"),
    PrivateName(
        "tensorflow.python.ops.resource_variable_ops:"
        "BaseResourceVariable.__init__",
        None,
        ("_unique_id",),
    ),
    PrivateName(
        "tensorflow.compiler.tf2xla.ops.gen_xla_ops:xla_all_reduce",
        "input, group_assignment, reduce_op, mode, name",
    ),
    PrivateName(
        f"{_DISTRIBUTE}.values:PerReplicaSpec.__init__",
        None,
        ("_value_specs",),
    ),
)
"""What is read or called, and where attributes without a class are set."""


def all_names() -> list[PrivateName]:
    """Returns all names, of both tables."""
    return [*OVERRIDDEN, *READ]
