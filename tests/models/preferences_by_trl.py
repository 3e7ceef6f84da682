"""What TRL makes of a few pairs: losses, metrics and gradients, for test_preferences.py.

Run it where TRL is installed; it uses nothing of this project and writes preferences_by_trl.json:

    pip install torch==2.13.0 trl==1.16.0 transformers==5.23.0 peft==0.21.2
    python tests/models/preferences_by_trl.py
"""

from __future__ import annotations

import hashlib
import json
import random
import tempfile
from pathlib import Path
from typing import Any

import torch

CONFIGS = Path(__file__).parents[2] / "configs" / "models"
VALUES = Path(__file__).with_suffix(".json")
MODELS = {"llama": "tiny-llama", "qwen3_5_text": "tiny-qwen3_5"}
TARGETS = {
    "llama": ["q_proj", "v_proj", "down_proj"],
    "qwen3_5_text": ["q_proj", "v_proj", "in_proj_qkv", "out_proj", "down_proj"],
}
VOCABULARY, END = 256, 255
BETA = 0.3
CASES = {
    "dpo": {},
    "dpo-hinge": {"loss": "hinge"},
    "dpo-ipo": {"loss": "ipo"},
    "dpo-sft": {"sft_weight": 0.5},
    "simpo": {"margin": 0.5},
    "simpo-smoothed": {"margin": 0.5, "label_smoothing": 0.1, "sft_weight": 0.25},
    "orpo": {},
    "kto": {"undesirable_weight": 0.6},
}
"""The keys of each objective beside BETA."""


def pairs(case: str) -> list[tuple[list[int], list[int], list[int]]]:
    """Return prompts, chosen and rejected answers of different lengths; answers end with END.

    For orpo prompts have one token: TRL's cross entropy is also of the tokens of prompts, and ours
    is of answers alone.
    """
    drawn = random.Random(7)

    def some(number: int) -> list[int]:
        return [drawn.randrange(END) for _ in range(number)]

    return [
        (
            some(1 if case == "orpo" else 2 + n),
            [*some(1 + (3 * n) % 5), END],
            [*some(1 + (2 * n + 1) % 4), END],
        )
        for n in range(5)
    ]


def answers(case: str) -> list[tuple[list[int], list[int], bool]]:
    """Return prompts, each with one answer and whether it is a good one.

    TRL takes the mean of the answers to other prompts: to prompt n, answer n - 1.
    """
    return [
        (prompt, rejected if n % 2 else chosen, n % 2 == 0)
        for n, (prompt, chosen, rejected) in enumerate(pairs(case))
    ]


def value(name: str, like: torch.Tensor) -> torch.Tensor:
    """Return the value of a parameter: a function of its name and shape alone."""
    seed = int.from_bytes(hashlib.sha256(name.encode()).digest()[:7], "little")
    generator = torch.Generator().manual_seed(seed)
    if name.endswith("A_log"):  # a state lives for some tokens, so that its gradients are large
        return (0.02 + 0.3 * torch.rand(like.shape, generator=generator)).log()
    if like.dim() == 1:
        return 0.3 + 0.7 * torch.rand(like.shape, generator=generator)
    # What comes out of a convolution is divided by its length: it is not to be small.
    return (0.5 if like.dim() == 3 else 0.1) * torch.randn(like.shape, generator=generator)


def summary(name: str, gradient: torch.Tensor) -> list[float]:
    """Return the length of a gradient, and its product with a vector that its name draws."""
    gradient, direction = gradient.double(), value(f"direction {name}", gradient).double()
    numbers = gradient.norm(), (gradient * direction).sum()
    return [float(f"{number:.9g}") for number in numbers]


def _fill(model: torch.nn.Module, prefix: str = "") -> None:
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            parameter.copy_(value(prefix + name.removeprefix("base_model.model."), parameter))


def _model(family: str, dtype: torch.dtype, prefix: str = "") -> Any:
    from transformers import AutoConfig, AutoModelForCausalLM

    config = AutoConfig.from_pretrained(CONFIGS / MODELS[family])
    model = AutoModelForCausalLM.from_config(config, attn_implementation="sdpa").to(dtype)
    _fill(model, prefix)
    return model


def _tokenizer() -> Any:
    from tokenizers import Tokenizer, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    words = {f"w{n}": n for n in range(END)} | {"</s>": END}
    tokenizer = Tokenizer(models.WordLevel(words, unk_token="w0"))
    tokenizer.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, eos_token="</s>", pad_token="w0", unk_token="w0"
    )


def _text(tokens: list[int]) -> str:
    return "".join(f"w{token} " for token in tokens if token != END)


def _dataset(case: str) -> Any:
    from datasets import Dataset

    if case == "kto":
        labelled = [
            {"prompt": _text(prompt), "completion": _text(answer), "label": label}
            for prompt, answer, label in answers(case)
        ]
        return Dataset.from_list(labelled)
    rows = [
        {"prompt": _text(prompt), "chosen": _text(chosen), "rejected": _text(rejected)}
        for prompt, chosen, rejected in pairs(case)
    ]
    return Dataset.from_list(rows)


def _trainer(case: str, model: Any, reference: Any, adapters: Any, folder: str) -> Any:
    keys = CASES[case]
    options = {
        "output_dir": folder,
        "per_device_train_batch_size": len(pairs(case)),
        "beta": BETA,
        "use_cpu": True,
        "report_to": [],
        "gradient_checkpointing": False,
        "bf16": False,
    }
    # Given a model that has adapters, DPOTrainer takes a copy of these for the reference.
    data = {
        "train_dataset": _dataset(case),
        "processing_class": _tokenizer(),
        "peft_config": adapters,
    }
    if case.startswith("dpo"):
        from trl import DPOConfig, DPOTrainer

        losses = [keys.get("loss", "sigmoid")]
        if "sft_weight" in keys:
            options |= {"loss_weights": [1.0, keys["sft_weight"]]}
            losses.append("sft")
        arguments = DPOConfig(loss_type=losses, **options)
        return DPOTrainer(model=model, ref_model=reference, args=arguments, **data)
    options |= {"max_length": 64}
    if case == "kto":
        from trl import KTOConfig, KTOTrainer

        arguments = KTOConfig(undesirable_weight=keys["undesirable_weight"], **options)
        return KTOTrainer(model=model, ref_model=reference, args=arguments, **data)
    if case == "orpo":
        from trl.experimental.orpo import ORPOConfig, ORPOTrainer

        return ORPOTrainer(model=model, args=ORPOConfig(**options), **data)
    from trl.experimental.cpo import CPOConfig, CPOTrainer

    arguments = CPOConfig(
        loss_type="simpo",
        simpo_gamma=keys["margin"],
        cpo_alpha=keys.get("sft_weight", 0.0),
        label_smoothing=keys.get("label_smoothing", 0.0),
        **options,
    )
    return CPOTrainer(model=model, args=arguments, **data)


def _run(case: str, family: str, mode: str, dtype: torch.dtype) -> dict[str, Any]:
    from peft import LoraConfig

    model, reference, adapters = _model(family, dtype), None, None
    if mode == "lora":
        adapters = LoraConfig(r=4, lora_alpha=8, target_modules=TARGETS[family])
    elif case.startswith(("dpo", "kto")):
        reference = _model(family, dtype, "reference ")
    with tempfile.TemporaryDirectory() as folder:
        trainer = _trainer(case, model, reference, adapters, folder)
        model = trainer.model
        if mode == "lora":
            _fill(model)
        batch = next(iter(trainer.get_train_dataloader()))
        model.train()
        loss = trainer.compute_loss(model, batch)
        loss.backward()
        metrics = dict(trainer._metrics["train"] if case.startswith(("dpo", "kto")) else {})
        if not metrics:
            metrics = trainer._stored_metrics["train"]
    gradients = {
        name.removeprefix("base_model.model."): parameter.grad
        for name, parameter in model.named_parameters()
        if parameter.grad is not None
    }
    return {
        "loss": loss.item(),
        "metrics": {
            name: values[-1]
            for name, values in metrics.items()
            if name.startswith(("rewards/", "logps/", "nll_loss", "kl"))
        },
        "gradients": {name: summary(name, gradient) for name, gradient in gradients.items()},
    }


def _in_both(case: str, family: str, mode: str) -> dict[str, Any]:
    """Return the values in float64, and how far float32 moves TRL's own from them.

    Of gradients it is a share of their length.
    """
    exact, rounded = (_run(case, family, mode, dtype) for dtype in (torch.float64, torch.float32))
    moved = [
        abs(a - b) / numbers[0]
        for name, numbers in exact["gradients"].items()
        for a, b in zip(numbers, rounded["gradients"][name])
    ]
    others = rounded["metrics"]
    of_metrics = max(abs(number - others[name]) for name, number in exact["metrics"].items())
    return {
        **exact,
        "rounding": float(f"{max(moved):.3g}"),
        "rounding of metrics": float(f"{of_metrics:.3g}"),
    }


def main() -> None:
    """Write the values of all cases."""
    found = {
        f"{family}/{mode}/{case}": _in_both(case, family, mode)
        for family in MODELS
        for mode in ("lora", "full")
        for case in CASES
        if mode == "lora" or case in ("dpo", "simpo", "orpo", "kto")
    }
    VALUES.write_text(json.dumps(found, indent=1) + "\n")


if __name__ == "__main__":
    main()
