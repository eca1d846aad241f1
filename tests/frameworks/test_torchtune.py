"""An unmodified recipe of torchtune, watched by `gradstat.auto`."""

import importlib.util
import math
from pathlib import Path
from typing import Any

import pytest
import torch
import torchtune
from omegaconf import OmegaConf
from torchtune.models.llama2 import llama2

import gradstat
from gradstat.monitor import AnomalyWarning

SHAPE = {"vocab_size": 32, "num_layers": 2, "num_heads": 2, "num_kv_heads": 2, "embed_dim": 16, "max_seq_len": 32}


class Checkpointer:
    def __init__(self, model_type: str, should_load_recipe_state: bool) -> None:
        pass

    def load_checkpoint(self) -> dict[str, Any]:
        return {"model": llama2(**SHAPE).state_dict()}

    def save_checkpoint(self, *_: Any, **__: Any) -> None:
        pass


class Tokens:
    pad_id = 0


def dataset(tokenizer: Tokens, **_: Any) -> list[dict[str, list[int]]]:
    tokens = torch.randint(1, 32, (16, 12)).tolist()
    return [{"tokens": line, "labels": line} for line in tokens]


def recipe(folder: Path, **changes: Any) -> Any:
    """Loads the recipe from its file, which is a program and cannot be imported by name."""
    path = Path(torchtune.__file__).parents[1] / "recipes" / "full_finetune_single_device.py"
    spec = importlib.util.spec_from_file_location("recipe", path)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    here = __name__
    settings = {
        **{"device": "cpu", "dtype": "fp32", "seed": 0, "epochs": 1, "batch_size": 2, "output_dir": str(folder)},
        **dict.fromkeys(("resume_from_checkpoint", "optimizer_in_bwd", "compile", "shuffle"), False),
        "max_steps_per_epoch": None,
        "gradient_accumulation_steps": 2,
        "checkpointer": {"_component_": f"{here}.Checkpointer", "model_type": "LLAMA2"},
        "model": {"_component_": "torchtune.models.llama2.llama2", **SHAPE},
        "tokenizer": {"_component_": f"{here}.Tokens"},
        "dataset": {"_component_": f"{here}.dataset"},
        "optimizer": {"_component_": "torch.optim.AdamW", "lr": 1e-3},
        "loss": {"_component_": "torchtune.modules.loss.CEWithChunkedOutputLoss"},
        "metric_logger": {"_component_": "torchtune.training.metric_logging.DiskLogger", "log_dir": str(folder)},
        **changes,
    }
    configuration = OmegaConf.create(settings)
    made = module.FullFinetuneRecipeSingleDevice(configuration)
    made.setup(configuration)
    return made


@pytest.mark.filterwarnings("ignore:'set_vital' is deprecated:UserWarning")
@pytest.mark.parametrize("clip", [None, 1e-3])
def test_a_bad_step_is_named_before_the_clip(clip: float | None, tmp_path: Path) -> None:
    made = recipe(tmp_path, clip_grad_norm=clip)
    handle = gradstat.auto(made._optimizer, made._model)
    name = "layers.1.attn.q_proj.weight"
    parameter = dict(made._model.named_parameters())[name]
    parameter.register_hook(lambda gradient: gradient * math.nan if made.global_step == 2 else gradient)
    with pytest.warns(AnomalyWarning, match=name):
        made.train()
    made.cleanup()
    assert handle.monitor.steps == 4
    found = handle.monitor.findings[0]
    assert (found.step, found.name, found.evidence["nonfinite_tensors"]) == (2, name, 1)
    assert (handle.monitor.recording().scalars["norm"][:2] > 0.1).all()  # divided by tokens, and before the clip
    handle.remove()
