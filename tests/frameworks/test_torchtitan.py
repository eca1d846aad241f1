"""The real torchtitan: its clip on several ranks, and its debug model, sharded by torchtitan, trained with a monitor.

Its own trainer needs a GPU: it sets a CUDA device, and none of its attention implementations trains on a CPU.
"""

from typing import Any

import pytest
import torch
import torch.distributed as dist
from helpers.layouts import Layout, assert_clips_as_one_process, make_layout_and_reference
from helpers.ranks import Ranks, on_ranks
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import FSDPModule
from torchtitan.distributed.fsdp import apply_fsdp_to_decoder
from torchtitan.distributed.utils import clip_grad_norm_
from torchtitan.models.common.attention import ScaledDotProductAttention
from torchtitan.models.llama3 import llama3_configs

import gradstat
from gradstat.distributed import audit_norm


def clip(layout: Layout, *arguments: Any) -> Any:
    return clip_grad_norm_(*arguments, pp_mesh=layout.pp_mesh, ep_enabled=layout.ep_enabled)


@pytest.mark.parametrize("layout", ["ddp", "fsdp2", "hsdp", "pp", "pp+fsdp2", "ep+fsdp2"])
@on_ranks(4)
def test_its_clip_is_as_in_one_process(layout: str) -> None:
    assert_clips_as_one_process(layout, clip, [2.0, 1.0])


@pytest.mark.parametrize("layout", ["fsdp2", "fsdp2+tp", "ep+fsdp2", "pp+fsdp2"])
@on_ranks(4)
def test_the_patch_makes_it_right_where_a_rank_has_an_empty_shard(layout: str) -> None:
    # One rank has empty shards of some parameters. torch's maximum raises for them, and the other ranks hang.
    with gradstat.patch_torch():
        assert_clips_as_one_process(layout, clip)


@pytest.mark.parametrize(
    ("layout", "forgets", "told"),
    [
        ("pp+fsdp2", (), None),
        ("pp+fsdp2", ("pp_mesh",), "norms are summed over groups of 2"),
        ("ep+fsdp2", (), None),
        ("ddp", (), None),
    ],
)
@on_ranks(4)
def test_a_wrong_norm_of_its_clip_is_explained(layout: str, forgets: tuple[str, ...], told: str | None) -> None:
    made, _ = make_layout_and_reference(layout)
    options = {"pp_mesh": made.pp_mesh, "ep_enabled": made.ep_enabled}
    kept = {name: value for name, value in options.items() if name not in forgets}
    norm = clip_grad_norm_(list(made.model.parameters()), 1e9, **kept)
    audit = audit_norm(made.model, norm)
    assert audit.ok is (told is None), audit
    assert told is None or audit.explanations[0].text.startswith(told), audit


def debug_model() -> list[float]:
    torch.manual_seed(0)
    config = llama3_configs["debugmodel"](attn_backend="flex")
    for layer in config.layers:
        layer.attention.inner_attention = ScaledDotProductAttention.Config()
    model = config.build()
    model.init_states()
    mesh = init_device_mesh("cpu", (dist.get_world_size(),), mesh_dim_names=("fsdp",))
    apply_fsdp_to_decoder(model, mesh, param_dtype=torch.float32, reduce_dtype=torch.float32, pp_enabled=False)
    for part in model.modules():
        if isinstance(part, FSDPModule):
            part.set_force_sum_reduction_for_comms(True)  # gloo supports no other reduction
    optimizer = torch.optim.AdamW(model.parameters(), lr=8e-4)
    tokens = torch.randint(0, 2000, (2, 33), generator=torch.Generator().manual_seed(dist.get_rank()))
    losses = []
    with gradstat.patch_torch(), gradstat.Monitor(model, optimizer) as monitor:
        for _ in range(4):
            optimizer.zero_grad()
            logits = model(tokens[:, :-1], positions=torch.arange(32).expand(2, 32).contiguous())
            loss = torch.nn.functional.cross_entropy(logits.flatten(0, 1).float(), tokens[:, 1:].flatten())
            loss.backward()
            monitor.step(loss)
            whole = gradstat.check(model).total_norm
            norm = clip_grad_norm_(model.parameters(), 1.0, foreach=True)
            assert norm.item() == pytest.approx(whole, rel=1e-6)
            assert gradstat.check(model).total_norm == pytest.approx(min(1.0, whole), rel=1e-5)
            optimizer.step()
            losses.append(loss.item())
    assert not monitor.diagnose().findings
    return losses


def test_its_debug_model_trains_watched_and_clipped(ranks: Ranks) -> None:
    for losses in ranks.run(2, debug_model):
        assert losses[-1] < losses[0]
