"""In-process rollouts over the forward pass of transformers: the engine that needs no extra package.

Consumes `GenerationRequest`s, produces `Completion`s. Its own decoding loop rather than transformers' `generate`, because that draws
all samples of a batch from one random stream: a sample would then depend on its neighbours, on the order of requests and on the batch
size. Here every sample owns a counter-based stream keyed by its seed (decoding.uniforms), the samples of one prompt share one prefill,
and finished samples leave the batch. A model with recurrent layers (Mamba) is prefilled without padding, prompts of equal length
together: padding would enter its state. Runs on the CPU; a GPU run uses vLLM.

Suffixes as in decoding.py: R = rows decoded together, P = distinct prompts, T = padded tokens, C = columns, V = vocabulary.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path

import torch
from transformers import AttentionInterface, AttentionMaskInterface, PreTrainedModel
from transformers.cache_utils import (
    Cache,
    CacheLayerMixin,
    DynamicCache,
    DynamicLayer,
    DynamicSlidingWindowLayer,
    LinearAttentionCacheLayerMixin,
    LinearAttentionLayer,
)
from transformers.masking_utils import sdpa_mask
from transformers.utils import logging as transformers_logging

from pivotrl.config.engines import TransformersEngineConfig
from pivotrl.errors import UserError
from pivotrl.rollouts.checkpoint_names import checkpoint_views
from pivotrl.rollouts.decoding import BufferCache, PromptRows, Row, plan_batches, sample_tokens
from pivotrl.rollouts.engine import EngineError, GenerationRequest, check_requests
from pivotrl.rollouts.expert_capture import ExpertCapture
from pivotrl.types import Completion
from pivotrl.weights.digest import digest_like
from pivotrl.weights.manifest import SentStream, TensorSpec, VerifiedStream, WeightCensus, check_stream
from pivotrl.weights.transformers_model import load_transformers

# Padded prompt tokens of one prefill pass: bounds its activations to some 100 MB for a 135M model, and is far above what a core needs to be busy.
_PREFILL_TOKENS = 8192
# Finished rows leave when they are this share of the batch: copying the others' cache costs about one or two decoding steps.
_COMPACTION_FRAC = 0.25
_ATTENTION = "pivotrl_grouped_sdpa"


class TransformersEngine:
    """Batched decoding with a key/value cache in this process.

    Log-probabilities are float32, under the distribution after temperature; for greedy samples (temperature 0) they are those of
    temperature 1. Equal to a plain forward pass over prompt and completion up to rounding (1e-4, tested), whatever the batch.
    """

    def __init__(
        self,
        model: PreTrainedModel,
        *,
        batch_size: int,
        stop_token_ids: Sequence[int],
        pad_token_id: int,
        policy_version: int,
        returns_routes: bool = False,
    ) -> None:
        self._is_recurrent = any(isinstance(layer, LinearAttentionLayer) for layer in _empty_layers(model))
        AttentionInterface.register(_ATTENTION, _grouped_sdpa)
        AttentionMaskInterface.register(_ATTENTION, sdpa_mask)
        model.set_attn_implementation(_ATTENTION)
        self._model = model.eval().requires_grad_(False)
        self._batch_size = batch_size
        self._stop_token_ids = frozenset(stop_token_ids)
        self._pad_token_id = pad_token_id
        self._policy_version = policy_version
        text_config = model.config.get_text_config(decoder=True)
        self._max_total_tokens: int = text_config.max_position_embeddings
        self._vocab_size: int = text_config.vocab_size
        self._is_partial = False
        self._sent: Mapping[str, str] = {}
        self._capture = ExpertCapture(model) if returns_routes else None

    @staticmethod
    def load(
        checkpoint_dir: Path, config: TransformersEngineConfig, *, stop_token_ids: Sequence[int], pad_token_id: int, policy_version: int = 0
    ) -> TransformersEngine:
        """Reads a Hugging Face checkpoint directory (config.json, safetensors).

        Raises:
            UserError: for a directory without a readable checkpoint, a model whose layers keep a state of another kind, or one without experts
                that is to return them.
        """
        # A stage shows its own progress; a second bar for a one-second load would tear it apart.
        transformers_logging.disable_progress_bar()
        try:
            model = load_transformers(checkpoint_dir, dtype=getattr(torch, config.dtype))
        except (OSError, ValueError) as error:
            raise UserError(
                f"{checkpoint_dir} holds no checkpoint that transformers can read ({str(error).splitlines()[0]})",
                rule="the policy is a Hugging Face checkpoint directory with config.json and safetensors",
                fix="check the path of the model or of the stage that writes it",
            ) from error
        return TransformersEngine(
            model,
            batch_size=config.batch_size,
            stop_token_ids=stop_token_ids,
            pad_token_id=pad_token_id,
            policy_version=policy_version,
            returns_routes=config.enable_return_routed_experts,
        )

    @property
    def policy_version(self) -> int:
        return self._policy_version

    def generate(self, requests: Sequence[GenerationRequest]) -> list[tuple[Completion, ...]]:
        """Completions by request, then by seed; at most `batch_size` samples are decoded together.

        Raises:
            EngineError: out of memory, or logits that are not finite.
            ValueError: for a request no model could serve (`check_requests`).
        """
        if self._is_partial:
            raise RuntimeError("the engine holds partial weights since a load_weights failed; load a complete set first")
        check_requests(requests, max_total_tokens=self._max_total_tokens, vocab_size=self._vocab_size)
        results: list[list[Completion | None]] = [[None] * len(request.seeds) for request in requests]
        with torch.inference_mode(), _allocation_failures_as_engine_errors():
            for batch in plan_batches(requests, max_rows=self._batch_size, max_total_tokens=self._max_total_tokens):
                self._decode(batch)
                for prompt in batch:
                    before: Completion | None = None
                    for row in prompt.rows:
                        routes = None if self._capture is None else self._capture.routes(row, like=before)
                        before = results[row.request_index][row.sample_index] = row.completion(self._policy_version, routes)
        return [tuple(completion for completion in samples if completion is not None) for samples in results]

    def weight_census(self) -> WeightCensus:
        """Names, shapes and types that `load_weights` demands: the checkpoint's."""
        tied = dict(self._model.all_tied_weights_keys)
        held = self._held()
        specs = {name: TensorSpec(tuple(tensor.shape), tensor.dtype) for name, tensor in held.items() if name not in tied}
        return WeightCensus(specs, tied)

    def load_weights(self, named_tensors: Iterable[tuple[str, torch.Tensor]], version: int) -> None:
        """Copies new weights into the model in place; see `Engine.load_weights`. No cache outlives a `generate`, so none is dropped."""
        targets = self._held()
        self._is_partial = True
        with torch.no_grad():
            for name, tensor in check_stream(named_tensors, self.weight_census()):
                targets[name].copy_(tensor)
        self._is_partial = False
        self._sent = named_tensors.digests if isinstance(named_tensors, SentStream | VerifiedStream) else {}
        self._policy_version = version

    def weight_digests(self) -> Mapping[str, str]:
        """Digests of the model's own tensors, read back, by the algorithm of the sender's, who may have computed them on another device."""
        held = self._held()
        return {name: digest_like(held[name], self._sent.get(name)) for name in self.weight_census().tensors}

    def close(self) -> None:
        """Frees the model; the engine cannot be used after that."""
        del self._model

    def _held(self) -> dict[str, torch.Tensor]:
        """The model's own tensors by checkpoint name."""
        return checkpoint_views(self._model.state_dict(), model_type=self._model.config.model_type)

    def _decode(self, batch: Sequence[PromptRows]) -> None:
        """Generates until every row of the batch is finished. One iteration = one token per row."""
        rows = [row for prompt in batch for row in prompt.rows]
        cache, mask_R_C, logits_R_V = self._prefill(batch)
        positions_R = mask_R_C.sum(dim=1)
        temperatures_R = torch.tensor([row.temperature for row in rows])
        step = 0
        while True:
            uniforms_R = torch.tensor([row.uniforms_T[step] if row.finish_reason is None else 0.0 for row in rows], dtype=torch.float64)
            tokens_R, logprobs_R = sample_tokens(logits_R_V, temperatures_R=temperatures_R, uniforms_R=uniforms_R)
            live = self._append(rows, tokens_R, logprobs_R)
            if not live:
                return
            if len(rows) - len(live) >= _COMPACTION_FRAC * len(rows):
                kept_R = torch.tensor(live)
                rows = [rows[index] for index in live]
                tokens_R, positions_R, temperatures_R, mask_R_C = (value[kept_R] for value in (tokens_R, positions_R, temperatures_R, mask_R_C))
                cache.keep(kept_R)
            mask_R_C = torch.nn.functional.pad(mask_R_C, (0, 1), value=1)
            output = self._model(
                input_ids=tokens_R[:, None], attention_mask=mask_R_C, position_ids=positions_R[:, None], past_key_values=cache, use_cache=True
            )
            if self._capture is not None:
                self._capture.take_step(rows)
            logits_R_V = output.logits[:, -1]
            positions_R = positions_R + 1
            step += 1

    def _append(self, rows: Sequence[Row], tokens_R: torch.Tensor, logprobs_R: torch.Tensor) -> list[int]:
        """Hands every row its token; the indices of rows that go on."""
        if not bool(torch.isfinite(logprobs_R).all()):
            raise EngineError(f"logits are not finite under policy version {self._policy_version}")
        for row, token_id, logprob in zip(rows, tokens_R.tolist(), logprobs_R.tolist(), strict=True):
            row.append(token_id, logprob, stop_token_ids=self._stop_token_ids)
        return [index for index, row in enumerate(rows) if row.finish_reason is None]

    def _prefill(self, batch: Sequence[PromptRows]) -> tuple[BufferCache, torch.Tensor, torch.Tensor]:
        """Runs every distinct prompt once, left-padded unless some layers are recurrent, and copies its cache to its samples.

        Returns:
            the cache of all rows, its attention mask int64 [R, C], and the logits [R, V] that predict the first new token.
        """
        num_rows, num_columns = sum(len(prompt.rows) for prompt in batch), max(len(prompt.prompt_token_ids) for prompt in batch)
        cache = BufferCache(_empty_layers(self._model))
        mask_R_C = torch.zeros(num_rows, num_columns, dtype=torch.int64)
        logits: list[torch.Tensor] = []
        first_row = 0
        for chunk in _prefill_chunks(batch, is_padded=not self._is_recurrent):
            ids_P_T, mask_P_T = self._left_padded([prompt.prompt_token_ids for prompt in chunk])
            chunk_cache = Cache(layers=_empty_layers(self._model))
            output = self._model(
                input_ids=ids_P_T,
                attention_mask=mask_P_T,
                position_ids=(mask_P_T.cumsum(dim=1) - 1).clamp_(min=0),
                past_key_values=chunk_cache,
                use_cache=True,
                logits_to_keep=1,
            )
            if self._capture is not None:
                self._capture.take_prompts(chunk, ids_P_T.shape[1])
            prompts_R = torch.tensor([index for index, prompt in enumerate(chunk) for _ in prompt.rows])
            rows = slice(first_row, first_row + len(prompts_R))
            cache.place(chunk_cache, rows=rows, prompts_R=prompts_R, shape=(num_rows, num_columns))
            mask_R_C[rows, num_columns - ids_P_T.shape[1] :] = mask_P_T[prompts_R]
            logits.append(output.logits[:, -1][prompts_R])
            first_row = rows.stop
        return cache, mask_R_C, torch.cat(logits)

    def _left_padded(self, prompts: Sequence[tuple[int, ...]]) -> tuple[torch.Tensor, torch.Tensor]:
        """Token ids and attention mask, int64 [P, T]: left, so that all rows write their next token into the same column."""
        num_tokens = max(len(prompt) for prompt in prompts)
        ids = [[self._pad_token_id] * (num_tokens - len(prompt)) + list(prompt) for prompt in prompts]
        mask = [[0] * (num_tokens - len(prompt)) + [1] * len(prompt) for prompt in prompts]
        return torch.tensor(ids), torch.tensor(mask)


def _prefill_chunks(batch: Sequence[PromptRows], *, is_padded: bool) -> Iterator[Sequence[PromptRows]]:
    """Cuts a batch, sorted by prompt length, into runs of at most `_PREFILL_TOKENS` padded tokens (a longer prompt goes alone).

    Args:
        is_padded: whether a run may hold prompts of differing lengths.
    """
    start = 0
    for end in range(1, len(batch) + 1):
        length = len(batch[end].prompt_token_ids) if end < len(batch) else None
        is_cut = length is not None and not is_padded and length != len(batch[start].prompt_token_ids)
        if length is None or is_cut or length * (end + 1 - start) > _PREFILL_TOKENS:
            yield batch[start:end]
            start = end


def _grouped_sdpa(
    module: torch.nn.Module,  # noqa: ARG001 - transformers' signature
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attention_mask: torch.Tensor | None,
    scaling: float | None = None,
    **_: object,
) -> tuple[torch.Tensor, None]:
    """Attention as transformers' `sdpa`, but grouped key/value heads are read in place.

    With a mask, transformers copies every key and value once per query head of its group; on a CPU that copy is 13 times the
    attention itself (32 rows, 512 columns, 9 heads on 3). Arguments and result: [R, heads, T, D] -> [R, T, heads, D].
    """
    is_causal = attention_mask is None and query.shape[2] > 1
    output = torch.nn.functional.scaled_dot_product_attention(
        query, key, value, attn_mask=attention_mask, scale=scaling, is_causal=is_causal, enable_gqa=True
    )
    return output.transpose(1, 2).contiguous(), None


def _empty_layers(model: PreTrainedModel) -> list[CacheLayerMixin | LinearAttentionCacheLayerMixin]:
    """An empty cache's layers: keys and values of all positions (a window is the mask's matter), or a recurrent state (Mamba, linear attention).

    Raises:
        UserError: where a layer keeps anything else, both, say, or where no layer keeps keys and values.
    """
    layers = DynamicCache(config=model.config).layers
    kinds = {type(layer) for layer in layers}
    unsupported = kinds - {DynamicLayer, DynamicSlidingWindowLayer, LinearAttentionLayer}
    if unsupported or kinds == {LinearAttentionLayer}:
        raise UserError(
            f"{type(model).__name__} keeps {', '.join(sorted(kind.__name__ for kind in unsupported or kinds))} state between tokens",
            rule="engine `transformers` decodes models whose layers each keep keys and values, a recurrent state or nothing, some of them the first",
            fix="set engine.type to vllm",
        )
    return [layer if isinstance(layer, LinearAttentionLayer) else DynamicLayer() for layer in layers]


@contextmanager
def _allocation_failures_as_engine_errors() -> Iterator[None]:
    """The boundary where running out of memory becomes an EngineError; any other exception is a bug and passes."""
    try:
        yield
    except MemoryError as error:
        raise EngineError("out of memory") from error
    except RuntimeError as error:
        # torch's CPU allocator has no exception class of its own.
        if "can't allocate memory" not in str(error) and not isinstance(error, torch.OutOfMemoryError):
            raise
        raise EngineError("out of memory") from error
