"""The names of torch that an analysis replaces; :func:`fxmem.patching.patch` takes no others."""

from __future__ import annotations

from dataclasses import dataclass

from fxmem.versions.release import Release


@dataclass(frozen=True)
class Interface:
    """Names of one module or class that serve one purpose.

    Attributes:
        owner: Where the names are found, as a dotted path.
        names: Looked up in the owner.
        purpose: For fxmem.
        replacement: A way to do without them.
        since: The first release that has them.
        before: The first release that has them no more.
        is_patched: Whether an analysis replaces them.
        is_optional: Whether fxmem does without a name that a build or a release lacks.
    """

    owner: str
    names: tuple[str, ...]
    purpose: str
    replacement: str
    since: Release | None = None
    before: Release | None = None
    is_patched: bool = False
    is_optional: bool = False


_SHOW = "answer as on a machine with the target GPU"
_EAGER = "run eagerly what would be compiled"
_INFERENCE = "run inference mode so that a TorchDispatchMode sees operators"
_REAL = "keep batches real"
_JOIN = "be one rank of a process group whose other ranks are not there"
_PAD = "answer which matrix products a GPU multiplies faster padded"
_COMPILE = "compile code outside of the recording that runs it"
_LOWER = "lower compiled code for a GPU that is not there"
_DEVICE = "get_device_properties device_count is_available current_device synchronize"
_FOREACH = "take foreach loops for fake parameters", "foreach=True, which users do not write"
_MEMORY = (
    "empty_cache reset_peak_memory_stats reset_accumulated_memory_stats memory_stats"
    " memory_allocated max_memory_allocated memory_reserved max_memory_reserved"
)
_EXCHANGE = (
    "init_process_group new_group broadcast_object_list all_gather_object gather_object"
    " scatter_object_list monitored_barrier"
)
_ROWS: tuple[tuple[str, ...], ...] = (
    # -- the GPU that is not there --
    (
        "torch.cuda?",
        "is_available is_initialized is_bf16_supported _is_in_bad_fork is_current_stream_capturing"
        " current_device _exchange_device _maybe_exchange_device initial_seed init _lazy_init"
        " synchronize set_device ipc_collect manual_seed manual_seed_all seed seed_all"
        " get_rng_state get_rng_state_all set_rng_state set_rng_state_all"
        " set_per_process_memory_fraction get_device_name get_device_capability"
        " get_device_properties get_arch_list device_count mem_get_info"
        f" memory_stats_as_nested_dict memory_summary {_MEMORY} Stream Event CUDAGraph"
        " ExternalStream stream set_stream current_stream default_stream FloatTensor DoubleTensor"
        " HalfTensor BFloat16Tensor LongTensor IntTensor ShortTensor CharTensor ByteTensor"
        " BoolTensor",
        _SHOW,
    ),
    (
        "torch.cuda.memory?",
        "is_initialized _lazy_init _record_memory_history _dump_snapshot mem_get_info"
        f" set_per_process_memory_fraction memory_stats_as_nested_dict memory_summary {_MEMORY}",
        _SHOW,
    ),
    (
        "torch.cuda.random?",
        "is_initialized _lazy_init current_device device_count initial_seed manual_seed"
        " manual_seed_all seed seed_all get_rng_state get_rng_state_all set_rng_state"
        " set_rng_state_all",
        _SHOW,
    ),
    ("torch.cuda.streams?", "Stream Event ExternalStream", _SHOW),
    (
        "torch.accelerator?",
        "is_available current_device_index synchronize set_device_index get_device_capability"
        f" current_accelerator device_count get_memory_info {_MEMORY} set_stream current_stream",
        _SHOW,
    ),
    (
        "torch._C?",
        "_get_accelerator _cuda_getCurrentRawStream _cuda_isInBadFork _cuda_clearCublasWorkspaces"
        " _accelerator_exchangeDevice _accelerator_maybeExchangeDevice"
        " _is_flash_attention_available",
        _SHOW,
    ),
    ("torch", "Generator Stream Event set_default_tensor_type", _SHOW),
    ("torch.version", "cuda", _SHOW),
    ("torch.utils.cpp_extension", "load load_inline", "compile no extension for CUDA"),
    ("torch.backends.cudnn", "version", _SHOW),
    ("torch.cuda.nccl", "version", _SHOW),
    ("torch.cuda.nvtx", "range_push range_pop", _SHOW),
    ("torch.distributed?", "is_nccl_available", _SHOW),
    ("torch.cuda.amp.common", "amp_definitely_not_available", _SHOW),
    ("torch.nn.modules.module.Module", "load_state_dict", "see a script resume"),
    ("torch.optim.optimizer.Optimizer", "load_state_dict", "see a script resume"),
    ("torch.storage.UntypedStorage", "data_ptr", "tell fake tensors that share memory"),
    ("torch.Tensor", "record_stream __new__", _SHOW),
    ("torch.Tensor", "_make_subclass as_subclass", "make a tensor of a subclass of a fake one"),
    ("torch.Tensor", "_make_wrapper_subclass", "show fake tensors as on the GPU"),
    ("torch.Tensor", "data_ptr __bool__", "run Python that launches kernels of other libraries"),
    (
        "torch.nn.parameter.UninitializedTensorMixin",
        "materialize",
        "make lazy parameters on the device that their module was moved to",
    ),
    ("torch.nn.parallel.data_parallel.DataParallel", "scatter", _SHOW),
    (
        "torch._subclasses.fake_tensor.FakeTensor",
        "device __new__",
        "show fake tensors as on the GPU",
    ),
    ("torch.optim.optimizer", "_foreach_supported_types", *_FOREACH),
    ("torch.utils._foreach_utils", "_foreach_supported_types", *_FOREACH),
    (
        "torch.utils.checkpoint.DefaultDeviceType",
        "_default_device_type",
        "have checkpoints restore the GPU's autocast",
        "set_device_type, which reads it no more",
    ),
    # -- what runs otherwise on fake tensors --
    ("torch", "clear_autocast_cache", "know until when casts of weights are kept"),
    ("torch.overrides", "has_torch_function", "keep modules on their fast paths in inference"),
    ("torch", "compile", _EAGER),
    ("torch.nn.modules.module.Module", "compile", _EAGER),
    (
        "torch._dynamo.eval_frame",
        "_stance _callback_from_stance",
        "run functions eagerly that were compiled before, and say so",
        "torch.compiler.set_stance, without saying so",
    ),
    # -- what the compiler asks, and where it stops --
    ("torch._dynamo.convert_frame.CatchErrorsWrapper?", "__call__", _COMPILE),
    ("torch._dynamo.compiled_autograd?", "_enable", "leave compiled autograd out, and say so"),
    ("torch._dynamo.guards.CheckFunctionManager?", "__init__", _COMPILE),
    (
        "torch._C._dynamo.guards.RootGuardManager?",
        "add_torch_function_mode_stack_guard",
        _COMPILE,
    ),
    ("torch._dynamo.eval_frame?", "set_fullgraph_compiled_frame_count", _COMPILE),
    ("torch._dynamo.utils?", "set_torch_function_mode_stack run_node", _COMPILE),
    ("torch._dynamo.output_graph.OutputGraph?", "example_inputs", _COMPILE),
    ("torch._dynamo.variables.tensor.TensorVariable?", "specialize", _COMPILE),
    ("torch._dynamo.output_graph.SubgraphTracer?", "create_proxy", _COMPILE),
    (
        "torch._dynamo.convert_frame?",
        "is_in_torch_dispatch_mode should_skip_due_to_torch_dispatch_mode",
        _COMPILE,
    ),
    (
        "torch._functorch._aot_autograd.runtime_wrappers.AOTDispatchAutograd?",
        "post_compile",
        "lower backward with forward, up to 2.9",
    ),
    ("torch._inductor.compile_fx?", "compile_fx", _LOWER),
    ("torch._dynamo.device_interface.CudaInterface?", _DEVICE, _LOWER),
    (
        "torch._dynamo.device_interface.CudaInterface.Worker?",
        "get_device_properties current_device",
        _LOWER,
    ),
    ("torch._inductor.graph.GraphLowering?", "_compile_to_module", _LOWER),
    ("torch._inductor.scheduler?", "has_triton", _LOWER),
    ("torch._inductor.codecache.PyCodeCache?", "load", _LOWER),
    (
        "torch._inductor.fx_passes.pad_mm?",
        "has_triton check_device should_pad_bench_key get_cached_should_pad",
        _PAD,
    ),
    ("torch._inductor.fx_passes.pad_mm?", "_should_pad", _PAD),
    ("torch._inductor.utils?", "get_device_tflops get_gpu_dram_gbps", _PAD),
    ("torch.utils._triton?", "triton_hash_with_backend", _LOWER),
    ("torch._subclasses.fake_tensor", "init_gpu_context", _LOWER),
    ("torch._C?", "_select_conv_backend _conv_determine_backend_memory_format", _LOWER),
    ("torch.Tensor", "__invert__ copy_ __getitem__", _LOWER),
    ("torch.nn.init", "_no_grad_trunc_normal_", "initialise weights that a fake cannot hold"),
    (
        "torch.nn.modules.module.Module",
        "_apply",
        "see a model moved to a device, and move parameters that are fake",
        "a TorchFunctionMode",
    ),
    ("torch.nn.parameter.UninitializedTensorMixin", "materialize", "settle lazy parameters"),
    ("torch._C", "_InferenceMode _set_grad_enabled", _INFERENCE),
    ("torch", "set_autocast_cache_enabled is_inference_mode_enabled", _INFERENCE),
    ("torch", "get_rng_state", "count the copies of random states"),
    ("torch.random", "get_rng_state default_generator", "see random states copied or set"),
    ("torch.autograd", "backward", "stop a script that trains when it is imported"),
    # -- what is watched --
    ("torch.nn.modules.module.Module", "__call__", "make nodes of leaf modules"),
    ("torch.autograd.function.Function", "apply", "make nodes of a user's functions"),
    ("torch.utils.checkpoint.CheckpointFunction", "apply", "see which get no gradient"),
    (
        "torch.utils.checkpoint?",
        "_checkpoint_without_reentrant_generator _checkpoint_without_reentrant_generator_impl",
        "see which calls of a model are checkpoints, from 2.14 on by the second",
    ),
    (
        "torch.distributed.fsdp._fully_shard._fsdp_param_group.FSDPParamGroup",
        "pre_forward",
        "make nodes of gathered parameters",
    ),
    (
        "torch.autograd.graph",
        "disable_saved_tensors_hooks",
        "let transforms of torch.func run while saved tensors are watched",
    ),
    (
        "torch.autograd.graph.saved_tensors_hooks",
        "__enter__",
        "let hooks of a user's code name devices",
    ),
    (
        "torch._C._autograd",
        "_saved_tensors_hooks_disable",
        "before 2.8, let Dynamo trace transforms of torch.func while saved tensors are watched",
    ),
    ("torch.storage.UntypedStorage", "resize_", "see storages resized"),
    ("torch.autograd", "_make_grads _engine_run_backward", "see backward begin and end"),
    ("torch.optim.optimizer.Optimizer", "__init__", "see a script's optimizers"),
    ("torch._subclasses.fake_tensor.FakeTensor", "tolist", "answer a script's reads"),
    ("torch._subclasses.fake_tensor.FakeTensor", "__reduce_ex__", "pickle what has no values"),
    ("torch.nn.parameter.Parameter", "__new__", "make a script's parameters fake"),
    ("torch.utils", "swap_tensors", "swap tensors that something holds weak references to"),
    ("torch", "save load", "leave the files of a script as they are"),
    ("torch.utils.data.dataloader.DataLoader", "__init__ __iter__", _REAL),
    ("torch.utils.data.dataloader._BaseDataLoaderIter", "__next__", _REAL),
    # -- processes that are not there --
    ("torch.multiprocessing", "start_processes", _JOIN),
    ("torch.multiprocessing.spawn", "start_processes", _JOIN),
    (
        "torch._library.fake_impl.FakeImplCtx",
        "new_dynamic_size",
        "say how many elements an operator finds",
    ),
    ("torch.distributed.checkpoint", "save async_save load", _JOIN),
    ("torch.distributed.launcher.api", "launch_agent", _JOIN),
    ("torch.distributed", f"get_backend {_EXCHANGE}", _JOIN),
    ("torch.distributed", "Reducer", "see when it reads its own counts"),
    ("torch.distributed.distributed_c10d", _EXCHANGE, _JOIN),
    ("torch.distributed.device_mesh?", "init_process_group new_group", _JOIN),
    (
        "torch.distributed.device_mesh.DeviceMesh?",
        "__init__ __getitem__ _flatten _unflatten _concatenate from_group",
        "compute with the ranks of a mesh, which are real tensors",
    ),
    (
        "torch.distributed.distributed_c10d.ProcessGroup",
        "_start_coalescing _end_coalescing",
        "send and receive in batches where no backend can, up to 2.7",
        "torch.distributed.batch_isend_irecv of fxmem's own",
    ),
    (
        "torch.nn.parallel.distributed",
        "_verify_param_shape_across_processes _sync_module_states",
        "build DistributedDataParallel without other ranks",
        "a process group of fxmem's own",
    ),
    (
        "torch.nn.parallel.distributed.DistributedDataParallel",
        "_check_comm_hook",
        "take hooks that ask for NCCL",
    ),
    (
        "torch.distributed.tensor._sharding_prop.ShardingPropagator?",
        "_propagate_tensor_meta_non_cached",
        "leave out the tensors of global shapes on which DTensor infers the shapes of results",
        "leave out operators that run within torch.distributed.tensor's own frames",
    ),
    (
        "torch.distributed.fsdp._fully_shard._fsdp_param",
        "_chunk_with_empty",
        "make of a parameter the shards that a rank takes, and not those of all ranks",
        "let it make all, which takes longer on many ranks",
    ),
    (
        "torch.distributed.tensor._op_schema",
        "_rebuild_tensor_from_dtensor_meta",
        "keep DTensor from making fake tensors on a GPU, which is not there",
    ),
    (
        "torch.distributed.tensor._random",
        "OffsetBasedRNGTracker _rng_tracker",
        "keep DTensor from reading the GPU's random number generator",
        "a state of fxmem's own",
    ),
)
"""Owner, names, use, and a way to do without. A release may lack names of an owner with ``?``."""

PATCHES = tuple(
    Interface(
        owner.removesuffix("?"),
        tuple(names.split()),
        purpose,
        "".join(instead) or "none",
        is_patched=True,
        is_optional=owner.endswith("?"),
    )
    for owner, names, purpose, *instead in _ROWS
)
