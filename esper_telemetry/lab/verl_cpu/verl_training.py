"""A training of verl on a CPU: its prompts, the worker and the manager that sample, the trainer, and its configuration."""

from __future__ import annotations

import contextlib
import os
import socket
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import hydra
import ray
import torch
import transfer_queue as tq
import verl.utils.model
from omegaconf import DictConfig, OmegaConf
from ray.util import remove_placement_group
from tensordict import TensorDict
from torch import Tensor
from torch.distributed.fsdp import CPUOffloadPolicy
from torch.utils.data import Dataset
from transformers import AutoModelForTokenClassification
from verl.single_controller.base.decorator import make_nd_compute_dataproto_dispatch_fn, register
from verl.single_controller.ray import RayWorkerGroup
from verl.trainer.ppo.utils import Role
from verl.trainer.ppo.v1 import trainer_base
from verl.trainer.ppo.v1.trainer_base import register_trainer
from verl.trainer.ppo.v1.trainer_sync import PPOTrainerSync
from verl.utils.tensordict_utils import list_of_dict_to_tensordict
from verl.workers.engine.fsdp import transformer_impl
from verl.workers.engine_workers import ActorRolloutRefWorker
from verl.workers.rollout.replica import RolloutReplica, RolloutReplicaRegistry

from esper_telemetry.lab.small_language_model import LETTERS, repeats_letter, tokenizer
from esper_telemetry.telemetry import Telemetry

FULL_PRECISION = "{param_dtype: fp32, reduce_dtype: fp32, buffer_dtype: fp32}"


BY_ROWS = make_nd_compute_dataproto_dispatch_fn(mesh_name="actor")
"""Each worker gets an equal part of the rows of its argument."""


class Prompts(Dataset):  # type: ignore[type-arg]
    """Each letter with a question mark."""

    def __init__(self, **_: Any) -> None:
        self._ids = [tokenizer()(f"{letter}?").input_ids for letter in LETTERS]

    def __len__(self) -> int:
        return len(LETTERS)

    def __getitem__(self, index: int) -> dict[str, Any]:
        return {"raw_prompt": f"{LETTERS[index]}?", "prompts": torch.tensor(self._ids[index])}


class SamplingWorker(ActorRolloutRefWorker):  # type: ignore[misc, unused-ignore]  # verl may be absent
    """An actor that also samples completions, with its own weights."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        if not torch.distributed.is_initialized():  # verl would name gloo for the CPU and again for its accelerator
            torch.distributed.init_process_group("gloo", rank=self.rank, world_size=self.world_size)

    @register(dispatch_mode=BY_ROWS)  # type: ignore[untyped-decorator, unused-ignore]
    def sample(self, data: TensorDict) -> TensorDict:
        """Return `responses` [B, T] and their log-probabilities `rollout_log_probs` [B, T] for `prompts` [B, P]."""
        rollout, engine = self.config.rollout, self.actor.engine
        if not hasattr(self, "generator"):
            self.generator = torch.Generator().manual_seed(1_000 * int(rollout.seed) + torch.distributed.get_rank())
        ids, chosen = data["prompts"], []
        with engine.eval_mode(), torch.no_grad():
            for _ in range(rollout.response_length):
                logits = engine.module(input_ids=ids, use_cache=False).logits[:, -1].float() / self.temperature
                log_probs = logits.log_softmax(-1)
                token = torch.multinomial(log_probs.exp(), 1, generator=self.generator)
                ids = torch.cat([ids, token], 1)
                chosen.append(log_probs.gather(1, token))
        fields = {"responses": ids[:, data["prompts"].shape[1] :], "rollout_log_probs": torch.cat(chosen, 1)}
        return TensorDict(fields, batch_size=len(ids))

    @property
    def temperature(self) -> float:
        """Temperature of sampling."""
        return float(self.config.rollout.temperature)


class SamplingManager:
    """Samples with the workers of the actor, scores the completions, and puts them into the TransferQueue."""

    def __init__(self, config: DictConfig, workers: Any) -> None:
        self._config, self._workers, self._tokenizer = config, workers, tokenizer()

    @classmethod
    def create(cls, config: DictConfig, llm_client: Any, **_: Any) -> SamplingManager:
        """See verl's `AgentLoopManager`."""
        return cls(config, llm_client)

    def generate_sequences(self, batch: TensorDict) -> None:
        """See verl's `AgentLoopManager`."""
        count, step = self._config.actor_rollout_ref.rollout.n, int(batch["global_steps"])
        uids, texts, ids = list(batch["uid"]), list(batch["raw_prompt"]), batch["prompts"].repeat_interleave(count, 0)
        sampled = self._workers.sample(TensorDict({"prompts": ids}, batch_size=len(ids)))
        keys = [f"{uid}_{session}_0" for uid in uids for session in range(count)]
        rows = []
        for place, (prompt, response) in enumerate(zip(ids, sampled["responses"], strict=True)):
            ended = (response == self._tokenizer.eos_token_id).nonzero()
            response = response[: int(ended[0]) + 1] if len(ended) else response
            text = self._tokenizer.decode(response, skip_special_tokens=True)
            rows.append(
                self.row(uids[place // count], texts[place // count], prompt, response, text)
                | {"rollout_log_probs": sampled["rollout_log_probs"][place, : len(response)].contiguous()}
            )
        versions = {"global_steps": step, "min_global_steps": step - 1, "max_global_steps": step - 1}
        tags = [
            {
                "status": "success",
                "prompt_len": len(row["prompts"]),
                "response_len": len(row["responses"]),
                "seq_len": len(row["input_ids"]),
                **versions,
            }
            for row in rows
        ]
        tq.kv_batch_put(keys=keys, partition_id="train", fields=list_of_dict_to_tensordict(rows), tags=tags)
        finished = [{"is_prompt": True, "status": "finished", "global_steps": step}] * len(uids)
        tq.kv_batch_put(keys=uids, partition_id="train", tags=finished)

    def row(self, uid: str, prompt_text: str, prompt: Tensor, response: Tensor, text: str) -> dict[str, Any]:
        """Return the fields of a completion."""
        ids, mask, scores = torch.cat([prompt, response]), torch.ones_like(response), torch.zeros(len(response))
        scores[-1] = self.reward(prompt_text, response, text)
        return {
            "uid": uid,
            "prompts": prompt,
            "responses": response,
            "response_mask": mask,
            "loss_mask": mask,
            "input_ids": ids,
            "position_ids": torch.arange(len(ids)),
            "rm_scores": scores,
            "num_turns": 2,
            "multi_modal_inputs": {},
        }

    def reward(self, prompt: str, response: Tensor, text: str) -> float:
        """Return the reward of a completion."""
        return repeats_letter([prompt], [text])[0]


@register_trainer("cpu")
class CpuTrainer(PPOTrainerSync):  # type: ignore[misc, unused-ignore]
    """verl's synchronous trainer without servers: the weights that sample are the weights that learn."""

    _enable_hybrid_replicas = False
    worker = SamplingWorker

    def __init__(self, config: DictConfig) -> None:
        config.trainer.v1.trainer_mode = "sync"
        super().__init__(config)

    def _init_resource_pool_mgr(self) -> None:
        super()._init_resource_pool_mgr()
        self.role_worker_mapping[Role.Actor] = ray.remote(self.worker)

    def get_llm_client(self) -> Any:
        """Return the workers that sample."""
        return self.actor_rollout_wg

    def on_init_end(self) -> None:
        """Send no weights."""

    on_step_end = on_sample_end = on_init_end


def cpu_config(model: Path, *, seed: int = 1, steps: int = 10, workers: int = 1, **settings: Any) -> DictConfig:
    """Return verl's configuration of the task. `settings` override it; their names have `__` in the place of dots."""
    chosen: dict[str, Any] = {
        "trainer.v1.trainer_mode": "cpu",
        "trainer.device": "cpu",
        "trainer.n_gpus_per_node": workers,
        "trainer.total_epochs": 100_000,
        "trainer.total_training_steps": steps,
        "trainer.logger": "[]",
        "trainer.val_before_train": False,
        "trainer.resume_mode": "disable",
        "trainer.balance_batch": True,
        "data.custom_cls.path": f"pkg://{__name__}",
        "data.custom_cls.name": "Prompts",
        "data.train_batch_size": 8,
        "data.val_batch_size": 8,
        "data.max_prompt_length": 2,
        "data.max_response_length": 6,
        "data.dataloader_num_workers": 0,
        "data.seed": seed,
        "algorithm.adv_estimator": "grpo",
        "actor_rollout_ref.hybrid_engine": False,
        "actor_rollout_ref.model.path": str(model),
        "actor_rollout_ref.model.use_remove_padding": False,
        "actor_rollout_ref.model.enable_gradient_checkpointing": False,
        "actor_rollout_ref.model.override_config.attn_implementation": "sdpa",
        "actor_rollout_ref.actor.strategy": "fsdp2",
        "actor_rollout_ref.actor.ppo_mini_batch_size": 4,
        "actor_rollout_ref.actor.ppo_epochs": 2,
        "actor_rollout_ref.actor.ppo_micro_batch_size_per_gpu": 16,
        "actor_rollout_ref.actor.data_loader_seed": seed,
        "actor_rollout_ref.actor.optim.lr": 3e-3,
        "actor_rollout_ref.actor.calculate_entropy": True,
        "actor_rollout_ref.actor.fsdp_config.use_torch_compile": False,
        "actor_rollout_ref.actor.fsdp_config.mixed_precision": FULL_PRECISION,
        "actor_rollout_ref.rollout.n": 8,
        "actor_rollout_ref.rollout.name": "cpu",
        "actor_rollout_ref.rollout.nnodes": 1,
        "actor_rollout_ref.rollout.seed": seed,
        "actor_rollout_ref.rollout.response_length": 6,
        "actor_rollout_ref.rollout.calculate_log_probs": True,
        "actor_rollout_ref.rollout.log_prob_micro_batch_size_per_gpu": 32,
        "actor_rollout_ref.rollout.agent.agent_loop_manager_class": f"{__name__}.SamplingManager",
        "actor_rollout_ref.ref.strategy": "fsdp2",
        "actor_rollout_ref.ref.log_prob_micro_batch_size_per_gpu": 32,
        "actor_rollout_ref.ref.fsdp_config.use_torch_compile": False,
        "actor_rollout_ref.ref.fsdp_config.mixed_precision": FULL_PRECISION,
        "critic.strategy": "fsdp2",
        "critic.model.path": str(model),
        "critic.model.tokenizer_path": str(model),
        "critic.model.use_remove_padding": False,
        "critic.model.enable_gradient_checkpointing": False,
        "critic.model.override_config.attn_implementation": "sdpa",
        "critic.ppo_mini_batch_size": 4,
        "critic.ppo_epochs": 2,
        "critic.ppo_micro_batch_size_per_gpu": 16,
        "critic.data_loader_seed": seed,
        "critic.optim.lr": 1e-2,
        "critic.fsdp.use_torch_compile": False,
        "critic.fsdp.mixed_precision": FULL_PRECISION,
        "reward.num_workers": 0,
        "transfer_queue.backend.SimpleStorage.num_data_storage_units": 1,
        **{name.replace("__", "."): value for name, value in settings.items()},
    }
    with hydra.initialize_config_module("verl.trainer.config", version_base=None):
        return hydra.compose("ppo_trainer", [f"++{name}={value}" for name, value in chosen.items()])


def load_critic(local_path: str, torch_dtype: Any, model_config: Any, trust_remote_code: bool) -> Any:
    """Return a critic, as `load_valuehead_model` does, but without flash-attention."""
    load = AutoModelForTokenClassification.from_pretrained
    return load(local_path, dtype=torch_dtype, config=model_config, attn_implementation="sdpa")


verl.utils.model.load_valuehead_model = load_critic
transformer_impl.CPUOffloadPolicy = lambda **_: CPUOffloadPolicy(pin_memory=False)
RolloutReplicaRegistry.register("cpu", lambda: RolloutReplica)


class LocalWorker:
    """Handle of a worker in this process, with the interface of a Ray actor's handle."""

    def __init__(self, worker: Any) -> None:
        self.worker = worker

    def __getattr__(self, name: str) -> Any:
        own = name == "__ray_call__"
        method = (lambda function, *args: function(self.worker, *args)) if own else getattr(self.worker, name)

        def remote(*args: Any, **kwargs: Any) -> Any:
            values = [ray.get(one) if isinstance(one, ray.ObjectRef) else one for one in args]
            return ray.put(method(*values, **kwargs))

        return SimpleNamespace(remote=remote)


class LocalWorkerGroup(RayWorkerGroup):  # type: ignore[misc, unused-ignore]
    """One worker in this process. Many short trainings would otherwise import verl in a new process each."""

    def _init_with_resource_pool(self, resource_pool: Any, ray_cls_with_init: Any, **_: Any) -> None:
        os.environ.update(WORLD_SIZE="1", RANK="0", MASTER_ADDR="127.0.0.1", MASTER_PORT=str(free_port()))
        self.resource_pool, self._world_size = resource_pool, 1
        initial = ray_cls_with_init.cls.__ray_actor_class__(*ray_cls_with_init.args, **ray_cls_with_init.kwargs)
        self._workers, self._worker_names = [LocalWorker(initial)], ["local"]


def free_port() -> int:
    """Return a port that no one listens to."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


def ray_settings(workers: int = 1) -> dict[str, Any]:
    """Return settings of `cpu_config` with which verl starts Ray on this machine, with a pretended GPU for each worker."""
    values = {"num_cpus": 16, "num_gpus": workers, "include_dashboard": False, "object_store_memory": 1 << 28}
    return {f"ray_kwargs__ray_init__{name}": value for name, value in values.items()}


@contextlib.contextmanager
def local_ray() -> Iterator[None]:
    """Context with Ray on this machine, which pretends to have eight GPUs, and with a TransferQueue."""
    ray.init(num_cpus=16, num_gpus=8, include_dashboard=False, log_to_driver=False, object_store_memory=1 << 28)
    try:
        tq.init(OmegaConf.create({"backend": {"SimpleStorage": {"num_data_storage_units": 1}}}))
        yield
        tq.close()
    finally:
        ray.shutdown()


def new_trainer(config: DictConfig, *, trainer: type[CpuTrainer] = CpuTrainer, in_process: bool = True) -> CpuTrainer:
    """Return a trainer that can `fit`, inside `local_ray`."""
    group = trainer_base.RayWorkerGroup
    trainer_base.RayWorkerGroup = LocalWorkerGroup if in_process else group
    try:
        torch.manual_seed(int(config.actor_rollout_ref.rollout.seed))
        made = trainer(OmegaConf.create(OmegaConf.to_container(config, resolve=True)))
        made.init()
        return made
    finally:
        trainer_base.RayWorkerGroup = group


def train(
    config: DictConfig,
    telemetry: Telemetry | None = None,
    *,
    trainer: type[CpuTrainer] = CpuTrainer,
    manager: type[SamplingManager] = SamplingManager,
    in_process: bool = True,
) -> CpuTrainer:
    """Train as verl's `TaskRunnerV1` does, inside `local_ray`, and return the trainer."""
    made = new_trainer(config, trainer=trainer, in_process=in_process)
    try:
        if telemetry is not None:
            # the adapter imports verl, which imports this module
            from esper_telemetry.adapters.verl import attach_trainer

            attach_trainer(telemetry, made)
        made.fit(manager.create(config, made.get_llm_client()))
    finally:
        for pool in made.resource_pool_manager.resource_pool_dict.values():
            for group in pool.pgs or ():  # its workers end
                remove_placement_group(group)
    return made
