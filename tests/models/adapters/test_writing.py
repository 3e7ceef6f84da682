import json
import subprocess
import sys
from pathlib import Path

import peft
import pytest
import torch
from safetensors.torch import load_file, save_file

from shardwise.config import Lora, Model, UserError
from shardwise.models.adapters import reading, writing
from shardwise.models.adapters.writing import merge_adapter, save_adapter
from shardwise.models.families import spec_of
from shardwise.models.load import read_config, weights
from shardwise.models.save import save_model
from tests.distributed import PATIENCE
from tests.left_out import some_now
from tests.models.tiny import (
    EACH_KIND,
    TINY,
    entries,
    loaded_by_transformers,
    logits,
    on_meta,
    relative_error,
    tiny,
    tokens,
    trained,
    with_adapters,
)

TOLERANCE = 1e-5  # float32, relative to the largest logit

# Plain transformers and peft, in a process of their own: every warning but transformers'
# deprecations is an error, so that adapter keys which PEFT does not find a place for cannot pass
# unseen.
SCRIPT = """
import json, sys, warnings
import torch
from peft import PeftModel
from safetensors.torch import save_file
from transformers import AutoModelForCausalLM

warnings.simplefilter("error")
warnings.simplefilter("ignore", FutureWarning)
torch.set_num_threads(1)
ids = torch.tensor(json.loads(sys.argv[1]))
out = {}
for folder in sys.argv[3:]:
    if "jet_nemotron" in folder:  # the last ones, of a model that transformers does not have
        import shardwise.models
    else:
        assert "shardwise" not in sys.modules
    base = AutoModelForCausalLM.from_pretrained(folder + "/base")
    model = PeftModel.from_pretrained(base, folder + "/adapter").eval()
    with torch.no_grad():
        out[folder] = model(input_ids=ids).logits
save_file(out, sys.argv[2])
"""

CASES = ("auto", "all", "list", "dora")
WITH_MAGNITUDES = ("tiny-llama", "tiny-gpt2", "tiny-qwen3_5", "tiny-qwen3_next", "tiny-jamba")
FIRST = (*EACH_KIND, *("tiny-llama", "tiny-olmo_hybrid", "tiny-qwen3_next", "tiny-qwen3_5-tied"))
FOLDERS = {
    "written": [name for name in TINY if name in FIRST],
    "others": [name for name in TINY if name not in FIRST],
}
"""Models whose adapters are loaded, by the fixture that writes them."""


def lora_for(name: str, case: str) -> Lora | None:
    if case == "auto":
        return Lora(r=3, alpha=7.0, dropout=0.1)
    if case == "all":
        model = on_meta(tiny(name))
        spec = spec_of(model.config, model)
        names = [spec.norm] if spec.tied else [spec.head, spec.norm]
        return Lora(r=4, alpha=4.0, targets="all-linear", rslora=True, modules_to_save=names)
    if case == "dora":
        targets = "attention" if name == "tiny-qwen3_next" else "auto"
        lora = Lora(r=3, alpha=7.0, dora=True, targets=targets)
        return lora if name in WITH_MAGNITUDES else None
    # No linear that PEFT can be told of as a module, and names that not all layers have.
    targets = ["layers.1.mlp.down_proj", "layers.2.mlp.shared_expert.up_proj"]
    return Lora(r=2, targets=targets) if name == "tiny-qwen3_next" else None


@pytest.fixture(scope="module")
def written(tmp_path_factory: pytest.TempPathFactory) -> dict[Path, torch.Tensor]:
    return write(FOLDERS["written"], tmp_path_factory)


@pytest.fixture(scope="module")
def others(tmp_path_factory: pytest.TempPathFactory) -> dict[Path, torch.Tensor]:
    return write(FOLDERS["others"], tmp_path_factory)


def write(names: list[str], tmp_path_factory: pytest.TempPathFactory) -> dict[Path, torch.Tensor]:
    """Folders with `base` and `adapter`, and the logits of the model that wrote them."""
    expected = {}
    for name in names:
        for case in CASES:
            lora = lora_for(name, case)
            if lora is None:
                continue
            model, _ = with_adapters(tiny(name), lora)
            for parameter_name, parameter in model.named_parameters():
                if ".modules_to_save." in parameter_name:
                    parameter.data.mul_(1.5)
            folder = tmp_path_factory.mktemp(f"{name}-{case}")
            save_model(model, weights(model, tiny(name), seed=0), folder / "base")
            save_adapter(model, lora, trained(model), folder / "adapter", base_name="base")
            expected[folder] = logits(model)
    return expected


@pytest.mark.parametrize("fixture", some_now(FOLDERS, ("written",)))
def test_peft_and_transformers_alone_load_what_is_saved(fixture, request, tmp_path):
    written = request.getfixturevalue(fixture)
    ids = json.dumps(tokens().tolist())
    folders = sorted(map(str, written), key=lambda folder: "jet_nemotron" in folder)
    command = [sys.executable, "-c", SCRIPT, ids, str(tmp_path / "out"), *folders]
    done = subprocess.run(command, capture_output=True, text=True, timeout=PATIENCE, cwd=tmp_path)
    assert done.returncode == 0, done.stderr[-2000:]
    theirs = load_file(tmp_path / "out")
    for folder, expected in written.items():
        assert relative_error(theirs[str(folder)], expected) < TOLERANCE, folder.name


@pytest.mark.parametrize("fixture", some_now(FOLDERS, ("written",)))
def test_a_merged_model_is_loaded_by_transformers_alone(fixture, request, tmp_path):
    written = request.getfixturevalue(fixture)
    for folder, expected in written.items():
        out = tmp_path / folder.name
        merge_adapter(Model(str(folder / "base")), folder / "adapter", out)
        assert relative_error(logits(loaded_by_transformers(out)), expected) < TOLERANCE, (
            folder.name
        )
        base = loaded_by_transformers(folder / "base")
        assert relative_error(logits(base), expected) > 0.01, (
            folder.name
        )  # the adapters do something


def test_the_saved_config_names_places_in_a_layer(written):
    folder = next(folder for folder in written if folder.name.startswith("tiny-qwen3_next-auto"))
    config = json.loads((folder / "adapter" / "adapter_config.json").read_text())
    assert sorted(config["target_modules"]) == [
        *("linear_attn.in_proj_ba", "linear_attn.in_proj_qkvz", "linear_attn.out_proj"),
        *(f"self_attn.{p}_proj" for p in "koqv"),
    ]
    assert sorted(config["target_parameters"]) == sorted(
        f"{mlp}.{p}_proj.weight"
        for mlp in ("mlp", "mlp.shared_expert")
        for p in ("gate", "up", "down")
    )
    assert (config["r"], config["lora_alpha"], config["base_model_name_or_path"]) == (
        3,
        7.0,
        "base",
    )


def test_the_saved_config_has_one_order(tmp_path):
    targets = ["q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"]
    for name, lora in (
        ("one", Lora(r=3, targets=targets)),
        ("other", Lora(r=3, targets=targets[::-1])),
    ):
        model, _ = with_adapters(tiny("tiny-llama"), lora)
        save_adapter(model, lora, trained(model), tmp_path / name, "base")
    one, other = (
        (tmp_path / name / "adapter_config.json").read_text() for name in ("one", "other")
    )
    assert one == other
    written = json.loads(one)["target_modules"]
    assert len(written) == len(targets)
    assert written == sorted(written)  # one order of 5,040, were it the set's


def test_merging_needs_an_adapter_that_fits(written, tmp_path):
    llama, olmo = (
        next(folder for folder in written if folder.name.startswith(f"{name}-auto"))
        for name in ("tiny-llama", "tiny-olmo_hybrid")
    )
    with pytest.raises(UserError, match=r"no adapter_config\.json here"):
        merge_adapter(Model(str(llama / "base")), tmp_path, tmp_path / "out")
    with pytest.raises(UserError, match="do not fit"):
        merge_adapter(Model(str(llama / "base")), olmo / "adapter", tmp_path / "out")


def test_adapters_of_integers_are_refused(tmp_path):
    model, _ = with_adapters(tiny("tiny-llama"), Lora(r=3))
    save_adapter(model, Lora(r=3), trained(model), tmp_path, "base")
    file = tmp_path / "adapter_model.safetensors"
    save_file({name: tensor.to(torch.int8) for name, tensor in load_file(file).items()}, file)
    with pytest.raises(UserError, match="is I8, which are no plain weights"):
        merge_adapter(tiny("tiny-llama"), tmp_path, tmp_path / "out")


def test_merging_into_random_weights_takes_the_seed(tmp_path):
    model, _ = with_adapters(tiny("tiny-llama"), Lora(r=3))
    save_adapter(model, Lora(r=3), trained(model), tmp_path / "adapter", "base")
    merge_adapter(tiny("tiny-llama"), tmp_path / "adapter", tmp_path / "out", seed=0)
    assert (
        relative_error(logits(loaded_by_transformers(tmp_path / "out")), logits(model)) < TOLERANCE
    )


def test_saving_wants_every_trainable_parameter(tmp_path):
    model, _ = with_adapters(tiny("tiny-llama"), Lora(r=3))
    state = trained(model)
    state.popitem()
    with pytest.raises(AssertionError, match="not the adapters of this model"):
        save_adapter(model, Lora(r=3), state, tmp_path, "base")


def test_merge_refuses_what_does_not_fit_and_what_would_be_lost(tmp_path, monkeypatch):
    llama = tiny("tiny-llama")
    config = read_config(llama)
    config.save_pretrained(tmp_path / "base")
    save_model(on_meta(llama), entries(llama).items(), tmp_path / "base")
    lora = Lora(r=2)
    adapted, _ = with_adapters(llama, lora)
    state = {name: p.detach() for name, p in adapted.named_parameters() if p.requires_grad}
    save_adapter(adapted, lora, state, tmp_path / "adapter", "base")
    base = Model(str(tmp_path / "base"))
    before = (tmp_path / "base" / "model.safetensors").read_bytes()
    with pytest.raises(UserError, match="is there already and not an empty folder"):
        merge_adapter(base, tmp_path / "adapter", tmp_path / "base")
    assert (tmp_path / "base" / "model.safetensors").read_bytes() == before
    in_the_way = tmp_path / "file"
    in_the_way.touch()
    monkeypatch.setattr(
        writing, "load_whole", None
    )  # nothing is loaded before the place is known to do
    for out in (in_the_way, in_the_way / "merged", in_the_way / "deep" / "merged"):
        with pytest.raises(UserError, match=r"cannot be written \(.*file: not a folder\)"):
            merge_adapter(base, tmp_path / "adapter", out)
    with monkeypatch.context() as patch:
        patch.setattr(
            "os.access", lambda path, mode: path != tmp_path
        )  # who runs tests as root may write everywhere
        with pytest.raises(UserError, match="no write permission"):
            merge_adapter(base, tmp_path / "adapter", tmp_path / "deep" / "merged")
    monkeypatch.undo()
    file = tmp_path / "adapter" / "adapter_model.safetensors"
    tensors = load_file(file)
    save_file(dict(list(tensors.items())[:4]), file)
    with pytest.raises(
        UserError, match=f"do not fit .* the file lacks: .* and {len(tensors) - 6} more"
    ):
        merge_adapter(base, tmp_path / "adapter", tmp_path / "merged")
    assert not (tmp_path / "merged").exists()


def test_the_files_have_the_names_that_peft_looks_for():
    assert reading.CONFIG_NAME == peft.utils.CONFIG_NAME
    assert reading.SAFETENSORS_WEIGHTS_NAME == peft.utils.SAFETENSORS_WEIGHTS_NAME
