"""Networks of as many kinds as timm has, small, captured whole with all passes: equal to eager mode
within rounding in inference, and their gradients in training."""

from __future__ import annotations

import pytest
import torch
from network_blocks import BACKWARD, CONV, LAST
from timm_networks import made
from torch import nn

from confpred.pytorch.backend import confpred as backend

#: Networks at images of side 64, and at those that they ask for.
AT_64 = """
caformer_s18 convmixer_768_32 convnext_atto convnext_femto_ols cs3darknet_focus_s cspresnet50
darknet53 davit_tiny densenet121 dla46_c dpn48b eca_resnet33ts ecaresnet26t edgenext_xx_small
efficientnet_b0 efficientvit_b0 ese_vovnet19b_slim fasternet_t0 fastvit_t8 fbnetv3_b
focalnet_tiny_srf gcresnet33ts ghostnet_100 ghostnetv2_100 hardcorenas_a hgnetv2_b0 hrnet_w18_small
inception_next_atto lcnet_050 legacy_seresnet18 mambaout_femto mixnet_s mnasnet_small
mobilenetv3_small_100 mobilenetv4_conv_small mobileone_s0 mobilevit_xxs nf_regnet_b0 poolformer_s12
pvt_v2_b0 regnetx_002 regnety_002 repghostnet_050 repvgg_a0 repvit_m0_9 res2net50_26w_4s resnest14d
resnet18 resnetv2_50 rexnet_100 selecsls42 shvit_s1 skresnet18 starnet_s1 swiftformer_xs
tf_efficientnet_b0 vgg11_bn vovnet39a xception41 xcit_nano_12_p16_224
"""
AT_THEIR_OWN = """
botnet26t_256 coat_lite_tiny coatnet_0_rw_224 convit_tiny crossvit_9_240 deit_tiny_patch16_224
efficientformer_l1 efficientformerv2_s0 efficientvit_m0 levit_conv_128s mvitv2_tiny tiny_vit_5m_224
visformer_tiny
"""
INFERENCE = dict.fromkeys(AT_64.split(), 64) | dict.fromkeys(AT_THEIR_OWN.split(), 0)
INFERENCE["inception_v3"] = 96
#: Those that also train.
TRAINING = """
convnext_atto densenet121 dla46_c ecaresnet26t edgenext_xx_small efficientnet_b0 efficientvit_b0
ese_vovnet19b_slim fasternet_t0 ghostnet_100 hardcorenas_a hgnetv2_b0 inception_next_atto lcnet_050
levit_conv_128s mixnet_s mnasnet_small mobilenetv3_small_100 mobileone_s0 regnetx_002 regnety_002
repghostnet_050 repvit_m0_9 resnet18 rexnet_100 starnet_s1 xcit_nano_12_p16_224
"""

pytestmark = pytest.mark.slow(reason="it captures a hundred networks")


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
def test_training_is_that_of_eager_mode(captured, monkeypatch, name: str) -> None:
    if name == "mobileone_s0":
        # The gradient of a filter of 1 x 1, stride 2 and 3 channels by oneDNN crashes on some
        # processors, in eager mode too.
        monkeypatch.setattr(torch.backends.mkldnn, "enabled", False)
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
