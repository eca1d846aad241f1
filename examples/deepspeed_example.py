"""A DeepSpeed loop in which a gradient becomes NaN: the parameter is named, though no rank has its whole gradient.

::

    pip install 'gradstat[frameworks]'
    torchrun --nproc-per-node 2 examples/deepspeed_example.py --stage 3

On a CPU set ``DS_ACCELERATOR=cpu``; DeepSpeed then compiles a small operator on first use, which takes a minute or two.
"""

from __future__ import annotations

import argparse

import deepspeed
import torch
from torch import Tensor, nn

import gradstat


def config(stage: int) -> dict[str, object]:
    """A DeepSpeed configuration for a ZeRO stage."""
    return {
        "train_micro_batch_size_per_gpu": 16,
        "gradient_clipping": 1.0,
        "optimizer": {"type": "AdamW", "params": {"lr": 1e-3, "torch_adam": True}},
        "zero_optimization": {"stage": stage},
        "steps_per_print": 1_000_000,
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--steps", type=int, default=40)
    parser.add_argument("--stage", type=int, default=3)
    options = parser.parse_args()
    torch.manual_seed(0)
    deepspeed.init_distributed(dist_backend=None if torch.cuda.is_available() else "gloo")
    model = nn.Sequential(nn.Linear(32, 64), nn.ReLU(), nn.Linear(64, 8))
    engine, *_ = deepspeed.initialize(model=model, model_parameters=model.parameters(), config=config(options.stage))
    monitor = gradstat.Monitor(engine, on_anomaly="record")  # the first added line
    is_first = torch.distributed.get_rank() == 0
    is_broken = False

    def corrupt(gradient: Tensor) -> Tensor:
        return torch.where(torch.arange(8, device=gradient.device) == 5, torch.nan, gradient) if is_broken else gradient

    model[2].get_parameter("bias").register_hook(corrupt)
    for step in range(options.steps):
        inputs = torch.randn(16, 32, device=engine.device)
        loss = (engine(inputs) - inputs[:, :8]).square().mean()
        is_broken = step == options.steps // 2
        engine.backward(loss)
        monitor.step(loss)  # and the second, before the engine's step
        engine.step()
        latest = monitor.latest()
        if is_first and latest is not None and step % 10 == 9:
            print(f"step {latest.step}: norm {latest.report.total_norm:.4f}", flush=True)
    monitor.flush()
    if is_first:
        print(monitor.diagnose())
    torch.distributed.destroy_process_group()


if __name__ == "__main__":
    main()
