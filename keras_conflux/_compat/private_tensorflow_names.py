"""Every name inside of TensorFlow that the core or the analysis relies on."""

from keras_conflux._compat.private_names import ListedName
from keras_conflux._compat.private_names import Private
from keras_conflux._compat.private_names import Public

MODULE_CALLS = (2, 21)
"""The first version whose names for calls of StableHLO modules were read."""

_HLO = "tensorflow.compiler.mlir.stablehlo.stablehlo"
_EAGER = "tensorflow.python.eager"
_FRAMEWORK = "tensorflow.python.framework"
_OPS = "tensorflow.python.ops"
_XLA = "tensorflow.compiler.tf2xla.ops.gen_xla_ops:"
_DISTRIBUTE = "tensorflow.python.distribute"
_VALUES = f"{_DISTRIBUTE}.values:"
_VARIABLE = f"{_VALUES}DistributedVariable"
_UTILITIES = f"{_DISTRIBUTE}.distribute_utils:"
_DEPENDENCIES = f"{_FRAMEWORK}.auto_control_deps"
_EXTENDED = f"{_DISTRIBUTE}.mirrored_strategy:MirroredExtended"
_POLYMORPHIC = f"{_EAGER}.polymorphic_function"
_FUNCTION = f"{_POLYMORPHIC}.polymorphic_function:Function"
CONTEXT = f"{_EAGER}.context:Context"
_GRAPHS = f"{_OPS}.control_flow_v2_func_graphs"


def _methods(owner: str, **parameters: str) -> list[Private]:
    """Returns methods by their names, of which each takes `self` first."""
    return [
        Private(f"{owner}.{name}", f"self, {others}".removesuffix(", "))
        for name, others in parameters.items()
    ]


OVERRIDDEN = (
    *_methods(
        _EXTENDED,
        __init__="container_strategy, devices, cross_device_ops",
        _scope="strategy",
        _replica_ctx_update="var, fn, args, kwargs, group",
        _use_merge_call="",
        _make_collective_ops_with_fallbacks="",
        _get_cross_device_ops="value",
        _create_variable="next_creator, kwargs",
        _get_variable_creator_initial_value=(
            "replica_id, device, primary_var, kwargs"
        ),
        _replica_ctx_all_reduce="reduce_op, value, options",
        _update="var, fn, args, kwargs, group",
        _call_for_each_replica="fn, args, kwargs",
        _reduce_to="reduce_op, value, destinations, options",
        _batch_reduce_to="reduce_op, value_destination_pairs, options",
        _gather_to_implementation="value, destinations, axis, options",
        _broadcast_to="tensor, destinations",
        _get_local_replica_id="replica_id_in_sync_group",
        _get_replica_id_in_sync_group="replica_id",
        _experimental_distribute_values_from_function="value_fn",
        _experimental_distribute_dataset="dataset, options",
        _distribute_datasets_from_function="dataset_fn, options",
    ),
    *_methods(
        _VARIABLE,
        _dense_var_to_tensor="dtype, name, as_ref",
        _get="",
        _get_cross_replica="",
        _as_graph_element="",
        _update_replica="update_fn, value, kwargs",
        _gather_saveables_for_checkpoint="",
        _get_replica="replica_id",
    ),
    *_methods(
        "tensorflow:distribute.CrossDeviceOps",
        _gather_implementation="per_replica_value, destinations, axis, options",
    ),
    *_methods(
        f"{_DISTRIBUTE}.distribute_lib:ReplicaContextBase",
        _merge_call="merge_fn, args, kwargs",
    ),
)
"""The methods that our classes override."""

TAPE_GRADIENT = Public("tensorflow:GradientTape.gradient")
TAPE_JACOBIAN = Public("tensorflow:GradientTape.jacobian")
TAPE_BATCH_JACOBIAN = Public("tensorflow:GradientTape.batch_jacobian")
FORWARD_OF_OPERATION = Private(
    f"{_EAGER}.forwardprop:_jvp_helper",
    "op_name, attr_tuple, inputs, outputs, tangents",
)
AVERAGE_LOSS = Public("tensorflow:nn.compute_average_loss")
SCALE_REGULARIZATION = Public("tensorflow:nn.scale_regularization_loss")
TO_TENSOR = Public("tensorflow:RaggedTensor.to_tensor")
SEQUENCE_MASK = Public("tensorflow:sequence_mask")
MERGE_CALL = Public("tensorflow:distribute.ReplicaContext.merge_call")
CONDITION = Private(f"{_OPS}.cond_v2:cond_v2", "pred, true_fn, false_fn, name")
INDEXED_CASE = Private(
    f"{_OPS}.cond_v2:indexed_case",
    "branch_index, branch_fns, name, lower_using_switch_merge",
)
LOOP = Private(
    f"{_OPS}.while_v2:while_loop",
    "cond, body, loop_vars, shape_invariants, parallel_iterations, "
    "maximum_iterations, name, return_same_structure, back_prop",
)
FUNCTION_CALL = Private(
    f"{_FUNCTION}.__call__", None, "_omit_frequent_tracing_warning"
)
_DRAWS = f"{_OPS}.gen_stateless_random_ops"
_DRAWN = "shape, key, counter, alg, dtype, name"
DRAWS = (
    *(
        Private(f"{_DRAWS}_v2:stateless_{name}_v2", _DRAWN)
        for name in ("random_uniform", "random_normal", "truncated_normal")
    ),
    Private(
        f"{_DRAWS}_v2:stateless_random_uniform_int_v2",
        "shape, key, counter, alg, minval, maxval, name",
    ),
    Private(
        f"{_DRAWS}:stateless_multinomial",
        "logits, num_samples, seed, output_dtype, name",
    ),
)
"""Operations whose rows can be drawn alone, or whose numbers depend on the
device that runs them."""
PATCHED = (
    *(x for x in list(vars().values()) if isinstance(x, ListedName)),
    *DRAWS,
)
"""The names that are replaced: all that have a name of their own above."""
READ = (
    Private("tensorflow:Graph", mentions="_functions, _get_function"),
    *_methods(
        "tensorflow:Graph", _add_function_recursive="function, overwrite"
    ),
    Private(
        f"{_FRAMEWORK}.func_graph:FuncGraph",
        mentions="capture, captures, control_outputs, internal_captures, "
        "outer_graph",
    ),
    Private(f"{_DEPENDENCIES}_utils:get_read_write_resource_inputs", "op"),
    Private(f"{_OPS}.resource_variable_ops:_UnreadVariable"),
    Private(
        "tensorflow:compat.v1.VariableScope.set_caching_device",
        "self, caching_device",
        "_caching_device",
    ),
    Private(f"{_DISTRIBUTE}.mirrored_run:_RequestedStop"),
    Private(
        f"{_DISTRIBUTE}.mirrored_run:_MirroredReplicaThread.__init__",
        "self, dist, coord, replica_id, devices, variable_creator_fn, fn, "
        "caching_scope, args, kwargs, thread_local_callables",
        "done, has_paused, main_result, merge_args, merge_kwargs, "
        "merge_result, should_run",
    ),
    Private(f"{_UTILITIES}regroup", "values, wrap_class, always_wrap"),
    Private(f"{_UTILITIES}select_replica", "replica_id, structured"),
    Private(f"{_UTILITIES}caching_scope_local"),
    Private(
        f"{_DISTRIBUTE}.shared_variable_creator:make_fn",
        "shared_variable_store, device_id",
    ),
    *_methods(
        f"{_OPS}.script_ops:FuncRegistry", __call__="token, device, args"
    ),
    Private(f"{_EAGER}.context:context", ""),
    Private(
        CONTEXT,
        mentions="_initialized, config, enable_collective_ops, "
        "ensure_initialized, function_call_options, get_config_key_value, "
        "get_task_states, report_error_to_cluster, set_config_key_value",
    ),
    Private(
        f"{_EAGER}.context:FunctionCallOptions",
        "executor_type, config_proto",
        "config_proto_serialized, executor_type",
    ),
    Private(f"{_FRAMEWORK}.config:is_op_determinism_enabled", ""),
    *_methods(
        CONTEXT,
        configure_collective_ops="collective_leader, "
        "scoped_allocator_enabled_ops, use_nccl_communication, device_filters",
        configure_coordination_service="service_type, service_leader, "
        "enable_health_check, cluster_register_timeout_in_ms, "
        "heartbeat_timeout_in_ms, shutdown_barrier_timeout_in_ms, "
        "coordinated_jobs, allow_new_incarnation_to_reconnect",
    ),
    Private(
        "tensorflow.python.client.device_lib:list_local_devices",
        "session_config",
    ),
    Private(_FUNCTION, mentions="_clone, _function_cache"),
    Private(
        f"{_DEPENDENCIES}:AutomaticControlDependencies",
        mentions="_control_flow_context, experimental_acd_manager, "
        "run_independently",
    ),
    Private(f"{_DEPENDENCIES}:op_is_stateful", "op"),
    Private(f"{_DEPENDENCIES}:_get_resource_inputs", "op"),
    Private("tensorflow:Operation", None, "_add_control_input, _update_input"),
    Private(f"{_GRAPHS}:CondBranchFuncGraph"),
    Private(f"{_GRAPHS}:WhileBodyFuncGraph"),
    Private(f"{_GRAPHS}:WhileCondFuncGraph"),
    Private(f"{_OPS}.control_flow_util:GraphOrParentsInXlaContext", "graph"),
    Private(f"{_EAGER}.record:could_possibly_record", ""),
    Private(
        f"{_EAGER}.forwardprop_util:pack_tangents", "tensors", "TangentInfo"
    ),
    Private(f"{_EAGER}.record:should_record_backprop", "tensors"),
    Private(f"{_OPS}.summary_ops_v2:_summary_state"),
    Private(
        f"{_OPS}.resource_variable_ops:BaseResourceVariable.__init__",
        None,
        "_unique_id, _handle",
    ),
    Private(
        f"{_XLA}xla_all_reduce",
        "input, group_assignment, reduce_op, mode, name",
    ),
    Private(f"{_XLA}xla_dynamic_update_slice", "input, update, indices, name"),
    Private(f"{_XLA}xla_optimization_barrier", "input, name"),
    Private(
        f"{_XLA}xla_call_module",
        "args, version, module, Sout, Tout, dim_args_spec, platforms, "
        "function_list, has_token_input_output, disabled_checks, "
        "use_shardy_partitioner, name",
        since=MODULE_CALLS,
    ),
    Private(f"{_HLO}:serialize_portable_artifact_str", since=MODULE_CALLS),
    Private(f"{_HLO}:get_current_version", since=MODULE_CALLS),
    Private(f"{_FRAMEWORK}.ops:get_gradient_function", "op"),
    Private(f"{_OPS}.handle_data_util:copy_handle_data", "source_t, target_t"),
    Private(f"{_VALUES}DistributedValues._get_on_device_or_primary", "self"),
    Private(f"{_VALUES}MirroredVariable"),
    Private(f"{_VALUES}SyncOnReadVariable"),
    Private(f"{_VARIABLE}.__init__", None, "_distributed_container"),
    Private(f"{_DISTRIBUTE}.values_util:get_current_replica_id_as_int", ""),
    Private(
        f"{_POLYMORPHIC}.concrete_function:ConcreteFunction.__init__",
        None,
        "_inference_function",
    ),
    Private(
        f"{_POLYMORPHIC}.atomic_function:AtomicFunction.call_with_captures",
        "self, args, kwargs, captures",
    ),
    Private(f"{_VALUES}PerReplicaSpec.__init__", None, "_value_specs"),
)
"""The names that are read or called, or on which attributes are set."""

NAMES = (*PATCHED, *OVERRIDDEN, *READ)
"""All of them."""
