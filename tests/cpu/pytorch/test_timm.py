"""Networks of as many kinds as timm has, small, captured whole with all passes: equal to eager mode
within rounding in inference, and their gradients in training."""

from __future__ import annotations

import pytest
import torch
from network_blocks import BACKWARD, CONV, LAST
from timm_networks import made
from torch import nn

from confpred.pytorch.backend import confpred as backend

#: Networks whose blocks differ, and the side of their images; 0 is what a network asks for. On a
#: GPU `benchmarks/networks/captured_networks.py` compares all of timm's.
AT_64 = """
convmixer_768_32 convnext_atto cspresnet50 densenet121 edgenext_xx_small efficientnet_b0
efficientvit_b0 ghostnet_100 inception_next_atto mixnet_s mobileone_s0 mobilevit_xxs nf_regnet_b0
regnety_002 repvit_m0_9 resnest14d resnet18 skresnet18 starnet_s1 xcit_nano_12_p16_224
"""
AT_THEIR_OWN = "coatnet_0_rw_224 convit_tiny levit_conv_128s"
INFERENCE = dict.fromkeys(AT_64.split(), 64) | dict.fromkeys(AT_THEIR_OWN.split(), 0)
#: Those that also train.
TRAINING = """
edgenext_xx_small efficientnet_b0 levit_conv_128s mixnet_s regnety_002 repvit_m0_9 resnet18
xcit_nano_12_p16_224
"""

pytestmark = pytest.mark.slow(reason="it captures networks of many layers")


def network(name: str) -> tuple[nn.Module, torch.Tensor]:
    model, images = made(name, INFERENCE[name])
    return model.to(memory_format=LAST), images.contiguous(memory_format=LAST)


def off(ours: torch.Tensor, theirs: torch.Tensor) -> float:
    """Return the difference as a part of the norm."""
    assert theirs.isfinite().all()
    return float((ours.double() - theirs.double()).norm() / theirs.double().norm())


@pytest.mark.parametrize("name", INFERENCE)
@torch.no_grad()
def test_inference_is_that_of_eager_mode(captured, name: str) -> None:
    model, images = network(name)
    model.eval()
    expected = model(images)
    found = torch.compile(model, backend=backend, fullgraph=True)(images)
    assert found.stride() == expected.stride()
    assert off(found, expected) < 1e-3
    assert captured.of("inference").count(CONV) > 0


@pytest.mark.parametrize("name", TRAINING.split())
def test_training_is_that_of_eager_mode(captured, name: str) -> None:
    model, images = network(name)
    model.train()
    state = {k: v.clone() for k, v in model.state_dict().items()}
    found = []
    for call in (torch.compile(model, backend=backend, fullgraph=True), model):
        model.load_state_dict(state)
        torch.manual_seed(2)
        out = call(images)
        model.zero_grad()
        out.square().mean().backward()
        grads = torch.cat([p.grad.flatten() for p in model.parameters() if p.grad is not None])
        buffers = torch.cat([b.flatten().double() for b in model.buffers()] or [torch.ones(1)])
        found.append((out.detach(), grads.clone(), buffers))
    for mine, other, tolerance in zip(*found, (1e-4, 1e-2, 1e-4), strict=True):
        assert off(mine, other) < tolerance
    assert captured.of("forward").count(CONV) > 0
    assert captured.of("backward").count(BACKWARD) > 0
