"""Networks of as many kinds as timm has, small, captured whole with all passes: equal to eager mode
within rounding in inference, and their gradients in training."""

from __future__ import annotations

import pytest
import torch
from timm_networks import made
from torch import nn

from confpred.pytorch.backend import confpred as backend

#: The side of the images; 0 for what the network asks for.
INFERENCE = {
    "botnet26t_256": 0, "caformer_s18": 64, "coat_lite_tiny": 0, "coatnet_0_rw_224": 0,
    "convit_tiny": 0, "convmixer_768_32": 64, "convnext_atto": 64, "convnext_femto_ols": 64,
    "crossvit_9_240": 0, "cs3darknet_focus_s": 64, "cspresnet50": 64, "darknet53": 64,
    "davit_tiny": 64, "deit_tiny_patch16_224": 0, "densenet121": 64, "dla46_c": 64, "dpn48b": 64,
    "eca_resnet33ts": 64, "ecaresnet26t": 64, "edgenext_xx_small": 64, "efficientformer_l1": 0,
    "efficientformerv2_s0": 0, "efficientnet_b0": 64, "efficientvit_b0": 64, "efficientvit_m0": 0,
    "ese_vovnet19b_slim": 64, "fasternet_t0": 64, "fastvit_t8": 64, "fbnetv3_b": 64,
    "focalnet_tiny_srf": 64, "gcresnet33ts": 64, "ghostnet_100": 64, "ghostnetv2_100": 64,
    "hardcorenas_a": 64, "hgnetv2_b0": 64, "hrnet_w18_small": 64, "inception_next_atto": 64,
    "inception_v3": 96, "lcnet_050": 64, "legacy_seresnet18": 64, "levit_conv_128s": 0,
    "mambaout_femto": 64, "mixnet_s": 64, "mnasnet_small": 64, "mobilenetv3_small_100": 64,
    "mobilenetv4_conv_small": 64, "mobileone_s0": 64, "mobilevit_xxs": 64, "mvitv2_tiny": 0,
    "nf_regnet_b0": 64, "poolformer_s12": 64, "pvt_v2_b0": 64, "regnetx_002": 64,
    "regnety_002": 64, "repghostnet_050": 64, "repvgg_a0": 64, "repvit_m0_9": 64,
    "res2net50_26w_4s": 64, "resnest14d": 64, "resnet18": 64, "resnetv2_50": 64,
    "rexnet_100": 64, "selecsls42": 64, "shvit_s1": 64, "skresnet18": 64, "starnet_s1": 64,
    "swiftformer_xs": 64, "tf_efficientnet_b0": 64, "tiny_vit_5m_224": 0, "vgg11_bn": 64,
    "visformer_tiny": 0, "vovnet39a": 64, "xception41": 64, "xcit_nano_12_p16_224": 64,
}  # fmt: skip
#: Of these, with gradients.
TRAINING = (
    "convnext_atto", "densenet121", "dla46_c", "ecaresnet26t", "edgenext_xx_small",
    "efficientnet_b0", "efficientvit_b0", "ese_vovnet19b_slim", "fasternet_t0", "ghostnet_100",
    "hardcorenas_a", "hgnetv2_b0", "inception_next_atto", "lcnet_050", "levit_conv_128s",
    "mixnet_s", "mnasnet_small", "mobilenetv3_small_100", "mobileone_s0", "regnetx_002",
    "regnety_002", "repghostnet_050", "repvit_m0_9", "resnet18", "rexnet_100",
    "starnet_s1", "xcit_nano_12_p16_224",
)  # fmt: skip
CONVOLUTIONS = ("confpred.conv2d.default", "confpred.conv2d_backward.default")

pytestmark = pytest.mark.slow(reason="it captures a hundred networks")


def network(name: str) -> tuple[nn.Module, torch.Tensor]:
    model, images = made(name, INFERENCE[name])
    last = torch.channels_last
    return model.to(memory_format=last), images.contiguous(memory_format=last)


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
    assert captured.of("inference").count("confpred.conv2d.default") > 0


@pytest.mark.parametrize("name", TRAINING)
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
    assert captured.of("forward").count(CONVOLUTIONS[0]) > 0
    assert captured.of("backward").count(CONVOLUTIONS[1]) > 0
