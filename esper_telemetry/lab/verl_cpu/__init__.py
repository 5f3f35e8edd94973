"""verl's synchronous PPO trainer on a CPU, with a small language model. It needs `esper-telemetry[verl]`.

verl trains on GPUs and samples with vLLM or SGLang. Everything that learns here is verl's own: `PPOTrainerSync`, its TransferQueue, its
workers, its FSDP2 engine and its losses. Four parts are replaced, where possible at a place that verl keeps open:

- the platform, by one whose device is the CPU and whose backend is gloo (`VERL_PLATFORM`);
- the servers that sample, by the actor's workers, which sample with PyTorch (`rollout.agent.agent_loop_manager_class`);
- the attention of the critic, for which verl requires flash-attention, and the pinned memory of the reference model;
- the data set, by eight prompts (`data.custom_cls`).

Ray counts a GPU for each worker, because verl asks for one. A program puts `ENVIRONMENT` into its environment before it imports verl:

    os.environ |= ENVIRONMENT
"""

ENVIRONMENT = {
    "VERL_PLATFORM": "cpu",
    "VERL_USE_EXTERNAL_MODULES": f"{__name__}.verl_platform,{__name__}.verl_training",
    "VERL_ENGINE_DEVICE": "cuda",  # the engine that verl registers for GPUs; it runs on the platform's device
}
"""Variables that verl reads when it is imported, in this process and in Ray's."""
