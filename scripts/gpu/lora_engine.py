"""Build a random policy with an adapter, and an engine that serves it in one of several ways; for lora_serving.py."""

import argparse
import time
from collections.abc import Callable, Iterator
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import torch

RANK, ALPHA = 32, 64
ADAPTER_ID = 1
MAX_NUM_SEQS = 64


class Policy:
    """A random base with a random adapter, as a trainer has them, and its log-probabilities."""

    def __init__(self, args: argparse.Namespace, config: Any) -> None:
        from peft import LoraConfig, get_peft_model
        from transformers import Qwen3ForCausalLM

        self.device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
        self.dtype = torch.bfloat16 if torch.cuda.is_available() else torch.float32
        torch.manual_seed(0)
        with self.device:
            base = Qwen3ForCausalLM._from_config(config, dtype=self.dtype)
        lora = LoraConfig(r=RANK, lora_alpha=ALPHA, target_modules="all-linear", task_type="CAUSAL_LM")
        self.model = get_peft_model(base, lora).eval()
        self.adapter = {n: w for n, w in self.model.named_parameters() if ".lora_" in n}
        with torch.no_grad():
            for name, weight in self.adapter.items():
                if ".lora_B." in name:
                    weight.normal_(std=args.b_std)

    @torch.no_grad()
    def score(self, samples: list[Any]) -> torch.Tensor:
        """Log-probabilities of all sampled tokens, under autocast to bfloat16 where the base is that."""
        found = []
        autocast = torch.autocast(self.device.type, torch.bfloat16, enabled=self.dtype == torch.bfloat16)
        for sample in samples:
            ids = [*sample.prompt_token_ids, *sample.outputs[0].token_ids]
            first = len(sample.prompt_token_ids)
            with autocast:
                logits = self.model(input_ids=torch.tensor([ids], device=self.device)).logits[0, first - 1 : -1]
            sampled = torch.tensor(ids[first:], device=self.device)
            found.append(logits.float().log_softmax(-1).gather(1, sampled[:, None])[:, 0].cpu())
        return torch.cat(found)

    def to_float32(self) -> None:
        self.model.float()
        self.dtype = torch.float32


class Server:
    """An engine, and how weights get into it."""

    def __init__(self, args: argparse.Namespace, policy: Policy, config: Any, folder: Path) -> None:
        from vllm import LLM

        from polar_trl.engine.colocate import prepare_vllm
        from polar_trl.engine.cuda_graphs import LLM_KWARGS

        config.save_pretrained(folder)
        kwargs = {**prepare_vllm(config, cpu=policy.device.type == "cpu"), **LLM_KWARGS[args.graphs]}
        if args.child == "lora":
            kwargs |= {"enable_lora": True, "max_lora_rank": RANK, "max_loras": 1}
        if policy.device.type == "cuda":
            kwargs |= {"dtype": "bfloat16", "gpu_memory_utilization": 0.35}
        started = time.monotonic()
        self.llm = LLM(
            model=str(folder),
            load_format="dummy",
            skip_tokenizer_init=True,
            max_model_len=1024,
            max_num_seqs=MAX_NUM_SEQS,
            max_num_batched_tokens=4096,
            logprobs_mode="processed_logprobs",
            **kwargs,
        )
        self.start_s = time.monotonic() - started
        self.runner = self.llm.llm_engine.model_executor.driver_worker.model_runner
        self.model = self.runner.model
        self.dtype = self.llm.llm_engine.model_config.dtype
        self.weights_gb = sum(w.numel() * w.element_size() for w in self.model.parameters()) / 1e9
        self._names = {name for name, _ in self.model.named_parameters()}
        self._packed = {part: whole for whole, parts in self.model.packed_modules_mapping.items() for part in parts}

    def push(self, weights: Iterator[tuple[str, torch.Tensor]]) -> None:
        for name, weight in weights:
            self.model.load_weights([(self._rename(name), weight)])

    def _rename(self, name: str) -> str:
        """vLLM 0.26 knows the weights of a layer inside its LoRA as `base_layer`'s; 0.31 passes them on."""
        owner, _, leaf = name.rpartition(".")
        parent, _, last = owner.rpartition(".")
        inside = f"{parent}.{self._packed.get(last, last)}"
        if f"{inside}.base_layer.{leaf}" not in self._names:
            return name
        passes_on = hasattr(self.model.get_submodule(inside), "load_weights")
        return name if passes_on else f"{owner}.base_layer.{leaf}"

    def push_adapter(self, policy: Policy) -> None:
        """Into the slot of `ADAPTER_ID`, which requests then name; vLLM's own request would read a folder."""
        from vllm.lora.lora_model import LoRAModel
        from vllm.lora.peft_helper import PEFTHelper

        manager = self.runner.lora_manager
        adapter = LoRAModel.from_lora_tensors(
            ADAPTER_ID,
            # copies, since vLLM multiplies B by the scaling in place
            {name.replace(".default.", "."): weight.data.clone() for name, weight in policy.adapter.items()},
            PEFTHelper(r=RANK, lora_alpha=ALPHA, target_modules="all-linear"),
            device=str(policy.device),
            dtype=manager.lora_config.lora_dtype,
            model_vocab_size=manager.vocab_size,
        )
        slots = manager._adapter_manager
        slots.remove_adapter(ADAPTER_ID)
        slots.add_adapter(adapter)
        slots.activate_adapter(ADAPTER_ID)

    def sample(self, args: argparse.Namespace, *, with_adapter: bool) -> tuple[list[Any], float]:
        """One answer for each prompt from a cold prefix cache, and seconds."""
        from vllm import SamplingParams
        from vllm.lora.request import LoRARequest

        draw = torch.Generator().manual_seed(2)
        prompts = [
            {"prompt_token_ids": torch.randint(100, args.vocab_size, (64,), generator=draw).tolist()}
            for _ in range(args.sequences)
        ]
        params = SamplingParams(
            temperature=1.0, max_tokens=args.sampled, logprobs=0, ignore_eos=True, detokenize=False
        )
        request = LoRARequest("policy", ADAPTER_ID, "in-memory") if with_adapter else None
        self.llm.reset_prefix_cache()
        started = time.monotonic()
        answers = self.llm.generate(prompts, params, use_tqdm=False, lora_request=request)
        return answers, time.monotonic() - started


def list_ways(policy: Policy, server: Server, kind: str) -> Iterator[tuple[str, Callable[[], None], bool]]:
    """Of an engine: a way's name, its push, and whether requests name the adapter."""
    from polar_trl.engine.lora import iter_merged
    from polar_trl.engine.rounding import round_weight

    def base() -> Iterator[tuple[str, torch.Tensor]]:
        for name, weight in policy.model.get_base_model().named_parameters():
            if ".lora_" not in name:
                yield name.replace(".base_layer.", "."), weight.data

    def merged(dithered: bool) -> Iterator[tuple[str, torch.Tensor]]:
        for name, weight, is_changed in iter_merged(policy.model, nullcontext):
            if is_changed:
                weight = round_weight(weight, name, server.dtype, seed=0, dithered=dithered)
            yield name, weight

    if kind == "whole":
        yield "merged, dithered", lambda: server.push(merged(True)), False
        yield "merged, to nearest", lambda: server.push(merged(False)), False
        yield "base without the adapter (control)", lambda: server.push(base()), False
    else:
        yield "the same in an engine built for LoRA (control)", lambda: server.push(base()), False
        yield "vLLM's LoRA", lambda: server.push_adapter(policy), True
