"""One process captures any number of networks; Dynamo keeps few graphs for each code object."""

from __future__ import annotations

import torch

import confpred


def test_each_of_many_networks_is_explained() -> None:
    images = torch.randn(2, 8, 9, 9, dtype=torch.half)
    for channels in range(8, 88, 8):
        model = torch.nn.Sequential(torch.nn.Conv2d(8, channels, 3), torch.nn.ReLU()).half()
        told = confpred.explain(model, images, device="h100")
        assert (told.step.parts, len(told.rows)) == (1, 1)
