"""Score an engine's samples by transformers and by the trainer's own pass, and give a verdict.

Used by correct.py. A batch is right when its mean gap to float32 is within the tolerance of the trainer's start-up
check, and wherever a token is not float32's own choice the two are a tie within twice that. Text alone decides
nothing: in bfloat16 a right engine's text differs from float32's at ties.
"""

from collections.abc import Callable, Sequence
from contextlib import nullcontext
from typing import Any

import numpy as np
import torch
from correct_sampling import Batch, Sample
from torch import Tensor
from transformers import AutoModelForCausalLM


class Reference:
    """A plain transformers model, one prompt at a time."""

    def __init__(self, path: str, dtype: torch.dtype, device: torch.device) -> None:
        self.model = AutoModelForCausalLM.from_pretrained(path, dtype=dtype).to(device).eval()
        self._device = device

    @torch.no_grad()
    def generate(self, prompt_ids: Sequence[int], max_tokens: int) -> list[int]:
        """The greedy answer."""
        ids = torch.tensor([list(prompt_ids)], device=self._device)
        pad = self.model.generation_config.pad_token_id or 0
        out = self.model.generate(
            ids, attention_mask=torch.ones_like(ids), do_sample=False, max_new_tokens=max_tokens, pad_token_id=pad
        )
        return list(out[0, ids.shape[1] :].tolist())

    @torch.no_grad()
    def score(
        self, prompt_ids: Sequence[int], token_ids: Sequence[int], temperature: float = 1.0
    ) -> tuple[Tensor, Tensor]:
        """[C] logprobs of given tokens, each after all before it, and [C] how much surer the model's own choice is."""
        ids = torch.tensor([[*prompt_ids, *token_ids]], device=self._device)
        logits = self.model(ids).logits[0, len(prompt_ids) - 1 : -1].float() / temperature
        logprobs = logits.log_softmax(-1)
        chosen = logprobs.gather(-1, ids[0, len(prompt_ids) :, None])[:, 0]
        return chosen.cpu(), (logprobs.max(-1).values - chosen).cpu()


class TrainerScore:
    """The pass that trains: rows packed into one sequence, prefixes shared, the LM head fused."""

    def __init__(self, path: str, device: torch.device) -> None:
        from polar_trl.grpo.packing.forward import choose_layout, prepare_model

        self._model = AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32).to(device).eval()
        self._device = device
        self._kind = choose_layout(self._model, None)
        prepare_model(self._model, self._kind)

    @torch.no_grad()
    def __call__(
        self, rows: Sequence[tuple[Sequence[int], Sequence[int]]], temperature: float, dtype: torch.dtype
    ) -> Tensor:
        """Logprobs of all completions, one after another; rows are pairs of prompt and completion."""
        from trl.trainer.utils import add_fused_lm_head

        from polar_trl.grpo.packing.forward import pack_rows, score

        add_fused_lm_head(self._model, temperature=temperature, outputs=("log_probs", "entropy"))
        # bf16: true keeps float32 weights and computes under autocast
        autocast = torch.autocast(self._device.type, dtype) if dtype != torch.float32 else nullcontext()
        parts = []
        for group in [[row] for row in rows] if self._kind == "single" else [rows]:
            ids = [np.array([*prompt, *tokens], dtype=np.int64) for prompt, tokens in group]
            sampled = [np.arange(len(prompt) + len(tokens)) >= len(prompt) for prompt, tokens in group]
            with autocast:
                logps_S, _ = score(self._model, pack_rows(ids, sampled, kind=self._kind, device=self._device))
            parts.append(logps_S.float().cpu())
        return torch.cat(parts)


def summarize_gap(gap: Tensor) -> dict[str, float]:
    """Mean, nearest-rank 99th percentile and largest of absolute differences in nats."""
    gap = gap.abs().double()
    place = -(-99 * len(gap) // 100)
    return {"mean": float(gap.mean()), "p99": float(gap.kthvalue(place).values), "max": float(gap.max())}


def render_gap(figures: dict[str, float]) -> str:
    return " / ".join(f"{figures[name]:.2g}" for name in ("mean", "p99", "max"))


def count_equal(token_ids: Sequence[int], reference: Sequence[int]) -> int:
    """Tokens before the first that differs."""
    pairs = list(zip(token_ids, reference, strict=False))
    return next((place for place, (one, other) in enumerate(pairs) if one != other), len(pairs))


class Judge:
    """Scores greedy batches by transformers in two precisions, and gives the verdict."""

    def __init__(
        self, model: str, tokenizer: Any, batches: Sequence[Batch], device: torch.device, *, max_text: int
    ) -> None:
        self._tokenizer = tokenizer
        self.references = {
            str(dtype).removeprefix("torch."): Reference(model, dtype, device)
            for dtype in (torch.float32, torch.bfloat16)
        }
        self.texts = {
            name: {
                batch.name: [
                    reference.generate(request.prompt_ids, min(request.max_tokens, max_text))
                    for request in batch.requests
                ]
                for batch in batches
            }
            for name, reference in self.references.items()
        }

    def judge(self, batch: Batch, samples: Sequence[Sample], dtype: str) -> dict[str, Any]:
        """The row of one batch, sampled by something that computes in `dtype`."""
        from polar_trl.grpo.selfcheck import find_tolerance

        gaps, same, not_best = {}, {}, []
        sampled = torch.tensor([logprob for sample in samples for logprob in sample.logprobs])
        for name, reference in self.references.items():
            scores = [
                reference.score(request.prompt_ids, sample.token_ids)
                for request, sample in zip(batch.requests, samples, strict=True)
            ]
            gaps[name] = summarize_gap(torch.cat([chosen for chosen, _ in scores]) - sampled)
            texts = self.texts[name][batch.name]
            same[name] = sum(count_equal(sample.token_ids, text) for sample, text in zip(samples, texts, strict=True))
            if name == "float32":
                lead = torch.cat([surer for _, surer in scores])
                not_best = lead[lead > 0].tolist()
        comparable = sum(len(text) for text in self.texts["float32"][batch.name])
        tolerance, _ = find_tolerance([torch.float32, getattr(torch, dtype)])
        # two tokens' log-probabilities may each be off by as much
        right = gaps["float32"]["mean"] <= tolerance and all(lead <= 2 * tolerance for lead in not_best)
        answer = repr(self._tokenizer.decode(samples[0].token_ids, clean_up_tokenization_spaces=False))[1:-1].replace(
            "|", "/"
        )
        overlaps = count_overlaps(batch, samples)
        return {
            "batch": f"{batch.name} ({overlaps} in time)" if overlaps else batch.name,
            "prompts": len(samples),
            "tokens": len(sampled),
            "answer": answer[:60] + ("..." if len(answer) > 60 else ""),
            "same": f"{same['float32']} / {same['bfloat16']} of {comparable}",
            "ties": f"{len(not_best)} ({not_best[0]:.2g}, {max(not_best):.2g})" if not_best else "0",
            "gap_float32": render_gap(gaps["float32"]),
            "gap_bfloat16": render_gap(gaps["bfloat16"]),
            "verdict": "right" if right else "WRONG",
            "figures": gaps,
            "tolerance": tolerance,
            "token_ids": [sample.token_ids for sample in samples],
            "arrived_while_decoding": overlaps,
        }

    def judge_bfloat16(self, batch: Batch) -> dict[str, Any]:
        """Measure transformers in bfloat16 against float32 on its own greedy text: what the precision alone costs."""
        samples = []
        for request, text in zip(batch.requests, self.texts["bfloat16"][batch.name], strict=True):
            chosen, _ = self.references["bfloat16"].score(request.prompt_ids, text)
            samples.append(Sample(token_ids=text, logprobs=chosen.tolist(), started_s=0.0, ended_s=0.0))
        return self.judge(batch, samples, "bfloat16")


def count_overlaps(batch: Batch, samples: Sequence[Sample]) -> int:
    """Requests that arrived later than the batch began, while one that was there from the start was still decoding."""
    first = [sample for request, sample in zip(batch.requests, samples, strict=True) if request.delay_s == 0.0]
    later = [sample for request, sample in zip(batch.requests, samples, strict=True) if request.delay_s > 0.0]
    return sum(sample.started_s < max(other.ended_s for other in first) for sample in later)


class Fidelity:
    """Measure sampled logprobs against the trainer's score of the same tokens."""

    def __init__(self, model: str, reference: Reference, device: torch.device) -> None:
        self._trainer = TrainerScore(model, device)
        self._reference = reference

    def measure(self, batch: Batch, samples: Sequence[Sample]) -> dict[str, Any]:
        """The row of one temperature. A score that fails is named in its cell."""
        rows = [(r.prompt_ids, s.token_ids) for r, s in zip(batch.requests, samples, strict=True)]
        sampled = torch.tensor([logprob for sample in samples for logprob in sample.logprobs])

        def plain() -> Tensor:
            return torch.cat([self._reference.score(*row, batch.temperature)[0] for row in rows])

        scores: dict[str, Callable[[], Tensor]] = {
            "trainer_bfloat16": lambda: self._trainer(rows, batch.temperature, torch.bfloat16),
            "trainer_float32": lambda: self._trainer(rows, batch.temperature, torch.float32),
            "transformers_float32": plain,
        }
        row: dict[str, Any] = {"temperature": batch.temperature, "prompts": len(rows), "tokens": len(sampled)}
        figures, logprobs = {}, {}
        for name, compute in scores.items():
            try:
                logprobs[name] = compute()
            except Exception as error:  # noqa: BLE001 - one kernel that does not work must not cost the other figures
                row[name] = row["failed"] = f"{type(error).__name__}: {str(error).splitlines()[0][:80]}"
                continue
            figures[name] = summarize_gap(logprobs[name] - sampled)
            row[name] = render_gap(figures[name])
        if "trainer_bfloat16" in logprobs and "trainer_float32" in logprobs:
            figures["precision"] = summarize_gap(logprobs["trainer_bfloat16"] - logprobs["trainer_float32"])
            row["precision"] = render_gap(figures["precision"])
        return {**row, "figures": figures}
