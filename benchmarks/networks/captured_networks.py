"""Capture networks of many kinds, and compare each with itself before.

    python -m benchmarks.networks.captured_networks    # on a GPU, all of them
    python -m benchmarks.networks.captured_networks --device cpu --networks 6 --workers 2

Each network of timm runs in inference (float16) and in training (autocast), by PyTorch and by
`confpred.optimize`, and in float32. An optimized result may be three times as far from float32 as
PyTorch's, and 0.01 of its norm more. Each worker is a process with its share of the networks, and a
crash costs only itself: the networks behind the one that crashed go on in another process. The
records are in
``benchmarks/results/DEVICE/captured_networks.json``; exit status 1 says that one of them failed.
"""

from __future__ import annotations

import argparse
import copy
import json
import os
import subprocess
import sys
import time
from collections import Counter
from concurrent.futures import ThreadPoolExecutor
from contextlib import AbstractContextManager, nullcontext
from pathlib import Path
from typing import Any

#: The smallest of each module of timm 1.0, and more of modules with several kinds in them.
NETWORKS = """
beit_base_patch16_224 cait_xxs24_224 coat_tiny coatnet_pico_rw_224 convformer_s18
convmixer_768_32 convnext_zepto_rms convnextv2_atto cpubone_nano
cs3darknet_focus_s csatv2 davit_tiny deit_tiny_patch16_224 densenet121 dla46x_c
dla60_res2next dpn48b dpn68 eca_nfnet_l0 ecaresnet26t edgenext_xx_small efficientformer_l1
efficientformerv2_s0 efficientnet_b0 efficientnet_lite0 efficientvit_b0
efficientvit_m0 ese_vovnet19b_dw ese_vovnet19b_slim_dw fasternet_t0 fastvit_t8 fbnetc_100
fbnetv3_b focalnet_tiny_srf gcresnext26ts gcvit_xxtiny gernet_s ghostnet_050 ghostnetv2_100
gmlp_ti16_224 halonet_h1 hardcorenas_b hgnetv2_b0 hiera_tiny_224 hrnet_w18_small
inception_next_atto inception_resnet_v2 inception_v3 inception_v4 lambda_resnet26rpt_256
lcnetv2_small legacy_seresnet18 legacy_xception levit_128s levit_conv_128s lowformer_b0
mambaout_femto maxvit_pico_rw_256 mixer_s32_224 mixnet_s mnasnet_small mobilenetv2_035
mobilenetv3_small_050 mobilenetv4_conv_small_050 mobileone_s1 mobilevit_xxs mobilevitv2_050
mvitv2_tiny naflexvit_base_patch16_gap nasnetalarge nest_tiny nextvit_small nf_regnet_b0
pit_ti_224 pnasnet5large poolformerv2_s12 pvt_v2_b0 rdnet_tiny regnetx_002 regnety_002
regnetz_b16 repghostnet_050 repvgg_a0 repvit_m1 res2next50 resnest14d resnet10t resnetv2_18
resnetv2_50 resnext50_32x4d rexnet_100 selecsls42 sequencer2d_s seresnext26t_32x4d shvit_s1
skresnet18 spnasnet_100 starnet_s050 swiftformer_xs swin_tiny_patch4_window7_224
swinv2_cr_tiny_224 swinv2_tiny_window8_256 tf_efficientnetv2_b0 tiny_vit_5m_224 tinynet_e
tnt_s_legacy_patch16_224 tresnet_m twins_svt_small vgg11 visformer_tiny
vit_srelpos_small_patch16_224 vit_tiny_patch16_224 vit_tiny_patch16_dinov3_qkvb
vit_tiny_r_s16_p8_224 vitamin_small_224 volo_d1_224 xception41p xcit_nano_12_p8_224
"""
MODES = ("inference", "training")
BATCH, SIZES = 2, (64, 96, 128, 192, 224, 256)
#: Allowed distance from float32: so many times PyTorch's own, and this part of the norm.
TIMES, MORE = 3.0, 0.01
_TIMEOUT_S = 600  # of a process
_LOST = 3  # exit status of a process that has lost the GPU, and has said so


def main() -> int:
    """Run what the command line names."""
    kind = argparse.RawTextHelpFormatter
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=kind)
    parser.add_argument("--device", choices=("cuda", "cpu"), default="cuda")
    parser.add_argument("--workers", type=int, default=12, help="processes at a time")
    parser.add_argument("--budget", type=float, default=86400, help="seconds, then it stops")
    parser.add_argument("--networks", type=int, help="only so many, from all over the list")
    parser.add_argument("--only", nargs="*", help="networks of timm, in place of the list")
    parser.add_argument("--eager", action="store_true", help="do not optimize: the noise itself")
    parser.add_argument("--out", type=Path, help="folder of the results")
    parser.add_argument("--worker", nargs="*", help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.worker is not None:
        for pair in args.worker:
            row = record(*pair.split(":"), args.device, args.eager)
            print(json.dumps(row), flush=True)
            if "CUDA error" in row.get("error", ""):
                return _LOST  # nothing more can be had from the GPU by this process
        return 0
    names = args.only or NETWORKS.split()
    if args.networks:
        names = names[:: max(1, len(names) // args.networks)][: args.networks]
    start = time.perf_counter()
    groups = [names[i :: args.workers] for i in range(min(args.workers, len(names)))]
    with ThreadPoolExecutor(args.workers) as pool:
        found = pool.map(lambda g: run_group(g, args, start + args.budget), groups)
        rows = [row for rows in found for row in rows]
    rows.sort(key=lambda row: (names.index(row["network"]), row["mode"]))
    return report(rows, args, time.perf_counter() - start)


def run_group(names: list[str], args: argparse.Namespace, end: float) -> list[dict[str, Any]]:
    """Return the records of `names`, made one after the other in a process, until `end`."""
    rows: list[dict[str, Any]] = []
    one_thread = dict(os.environ, OMP_NUM_THREADS="1")  # the workers are as many as the cores
    left = [(name, mode) for name in names for mode in MODES]
    while left:
        command = [
            sys.executable,
            "-m",
            "benchmarks.networks.captured_networks",
            "--device",
            args.device,
        ]
        command += ["--eager"] * args.eager
        command += ["--worker", *(f"{name}:{mode}" for name, mode in left)]
        left_s = end - time.perf_counter()
        try:
            done = subprocess.run(
                command, capture_output=True, text=True, timeout=max(1, min(_TIMEOUT_S, left_s)),
                env=one_thread,
            )  # fmt: skip
            said, blamed = done.stdout, done.returncode != _LOST
            why = f"exit status {done.returncode}: {done.stderr[-300:]}"
        except subprocess.TimeoutExpired as late:
            out = late.stdout or b""
            said, blamed = out.decode() if isinstance(out, bytes) else out, True
            why = "no answer in time"
        new = [json.loads(line) for line in said.splitlines() if line.startswith("{")]
        rows += new
        found = {(row["network"], row["mode"]) for row in rows}
        left = [pair for pair in left if pair not in found]
        if time.perf_counter() >= end:
            break
        if left and blamed:  # the first of them is where the process ended
            name, mode = left[0]
            rows.append({"network": name, "mode": mode, "error": why, "is_right": False})
            # A network whose inference crashed is not tried in training.
            left = [pair for pair in left if pair[0] != name]
    return rows


def report(rows: list[dict[str, Any]], args: argparse.Namespace, seconds: float) -> int:
    """Write `rows` with what they come to, and print it."""
    from benchmarks import provenance

    counts = {
        mode: {
            "networks": sum(row["mode"] == mode for row in rows),
            "right": sum(row["mode"] == mode and row["is_right"] for row in rows),
            "compared": sum(r["mode"] == mode and r.get("is_compared", False) for r in rows),
            "captured": dict(Counter(r.get("captured", "-") for r in rows if r["mode"] == mode)),
        }
        for mode in MODES
    }
    gpu = args.device == "cuda"
    told = provenance.provenance("torch", "timm", gpu=gpu)
    result = {
        "provenance": told,
        "batch": BATCH,
        "allowed": f"{TIMES} x PyTorch's distance from float32 + {MORE}",
        "seconds": round(seconds, 1),
        "counts": counts,
        "networks": rows,
    }
    if args.out or gpu:
        print(provenance.write("captured_networks", result, provenance.folder_of(args.out)))
    for row in rows:
        if not row["is_right"]:
            print(row["network"], row["mode"], row.get("error") or row.get("off"))
    print(json.dumps(counts, indent=1), f"{seconds:.0f} s")
    return 0 if all(row["is_right"] for row in rows) else 1


# ---------------------------------------------------------------------------------- in a worker


def record(name: str, mode: str, device: str, eager: bool) -> dict[str, Any]:
    """Return the record of one network in one mode."""
    import torch

    start = time.perf_counter()
    row: dict[str, Any] = {"network": name, "mode": mode}
    try:
        row |= compared(name, mode, device, eager)
    except Exception as error:
        row |= {"error": f"{type(error).__name__}: {str(error)[:300]}", "is_right": False}
    torch._dynamo.reset()
    if device == "cuda":
        torch.cuda.empty_cache()
    return row | {"seconds": round(time.perf_counter() - start, 2)}


def compared(name: str, mode: str, device: str, eager: bool) -> dict[str, Any]:
    """Return what three runs of a network differ by."""
    import torch

    import confpred

    for layout in (torch.channels_last, torch.contiguous_format):
        model, size = built(name, device, layout)
        generator = torch.Generator().manual_seed(1)
        images = torch.randn(BATCH, 3, size, size, generator=generator).to(device)
        images = images.to(memory_format=layout)
        try:
            exact = run(copy.deepcopy(model), mode, images, exactly=True)
            theirs, again = (run(copy.deepcopy(model), mode, images) for _ in range(2))
            break
        except RuntimeError:  # such as a view of what is not channels first
            if layout is torch.contiguous_format:
                raise
    torch._dynamo.utils.counters.clear()
    mine_model = model if eager else confpred.optimize(model)
    start = time.perf_counter()
    calls = [run(mine_model, mode, images)]
    first_s = time.perf_counter() - start
    # A CUDA graph is recorded at the second call and replayed at the third; gradients and
    # statistics are those of a first step each time.
    calls += [run(mine_model, mode, images) for _ in range(2)]
    graphs = torch._dynamo.utils.counters["stats"]["unique_graphs"]
    breaks = dict(torch._dynamo.utils.counters["graph_break"])
    captured = "not" if not graphs else "in parts" if breaks else "whole"
    off: dict[str, Any] = {}
    is_right = is_compared = True
    for part, right in exact.items():
        own = [distance(theirs[part], right), distance(again[part], right)]
        ours = [distance(call[part], right) for call in calls]
        allowed = TIMES * max(own) + MORE
        off[part] = {"pytorch": max(own), "confpred": max(ours)}
        is_right &= all(x <= allowed for x in ours)
        is_compared &= max(own) < 1.0  # else PyTorch's own result says nothing
    return {
        "size": size,
        "layout": str(layout).removeprefix("torch."),
        "captured": captured,
        "breaks": [reason.strip().splitlines()[0][:120] for reason in breaks],
        "first_s": round(first_s, 2),
        "off": off,
        "is_compared": is_compared,
        "is_right": is_right,
    }


def built(name: str, device: str, layout: Any) -> tuple[Any, int]:
    """Return a network in float32 whose layers all take part, and the size of its images.

    timm starts many networks with branches that are multiplied by zero or nearly so; scales of a
    value a channel are drawn anew. The size is the smallest that the network takes.
    """
    import torch

    last: Exception = ValueError(f"the outputs of {name} are not finite")
    refused = (RuntimeError, AssertionError, ValueError, IndexError, ZeroDivisionError)
    for draws in (True, False):  # few networks are not finite with what is drawn
        for size in SIZES:
            torch.manual_seed(0)
            try:
                model = created(name, size)
                if draws:
                    randomize(model)
                model.to(device, memory_format=layout)
                images = torch.randn(BATCH, 3, size, size, device=device)
                if is_lively(model, images):
                    return model, size
            except refused as error:
                last = error
                if "CUDA error" in str(error):
                    raise
    raise last


def created(name: str, size: int) -> Any:
    """Return a network of timm that draws no random numbers."""
    import timm
    import torch

    try:
        model = timm.create_model(name, img_size=size)
    except TypeError:
        model = timm.create_model(name)
    for module in model.modules():
        if isinstance(module, torch.nn.Dropout) or type(module).__name__.startswith("Drop"):
            for field in ("p", "drop_prob"):
                if isinstance(getattr(module, field, None), float):
                    setattr(module, field, 0.0)
        for field in ("drop_rate", "attn_drop_p", "attn_drop_rate"):
            if isinstance(getattr(module, field, None), float):
                setattr(module, field, 0.0)
    return model


def is_lively(model: Any, images: Any) -> bool:
    """Give batch norms the statistics of `images`; return whether the outputs are finite."""
    import torch

    model.eval()
    norms = [m for m in model.modules() if isinstance(m, torch.nn.BatchNorm2d)]
    momenta = [norm.momentum for norm in norms]
    with torch.no_grad():
        model(images)
        for norm in norms:
            norm.train()
            norm.momentum = 1.0
        model(images)
        for norm, momentum in zip(norms, momenta, strict=True):
            norm.momentum = momentum
        model.eval()
        out = flat(model(images))
        model.train()  # a batch norm of one number is refused
        model(images)
        model.eval()
    return bool(out.isfinite().all() and out.std() > 0)


def randomize(model: Any) -> None:
    """Draw scales and shifts of channels anew."""
    import torch

    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if parameter.numel() == max(parameter.shape, default=1):
                if name.endswith("bias"):
                    parameter.normal_(0, 0.1)
                else:
                    parameter.uniform_(0.2, 0.6)


def run(model: Any, mode: str, images: Any, exactly: bool = False) -> dict[str, Any]:
    """Return the results of one call in `mode`; in float32 without TF32 if `exactly`.

    The model's buffers are as they were, and it has no gradients left.
    """
    import torch

    gpu = images.is_cuda
    half = torch.float16 if gpu else torch.bfloat16
    tf32 = torch.backends.cudnn.allow_tf32
    torch.backends.cudnn.allow_tf32 = tf32 and not exactly
    buffers = [(buffer, buffer.clone()) for buffer in model.buffers()]
    torch.manual_seed(2)
    try:
        if mode == "inference":
            model.eval()
            if not exactly:
                model.to(half)
                buffers = []
            with torch.no_grad():
                out = model(images if exactly else images.to(half))
            return {"output": flat(out)}
        model.train()
        cast: AbstractContextManager[Any] = nullcontext()
        if not exactly:
            cast = torch.autocast(images.device.type, half)
        with cast:
            out = flat(model(images))
        # A gradient for each number: means would be lost in float16.
        numbers = torch.Generator().manual_seed(3)
        weights = torch.randn(out.shape, generator=numbers).to(out.device)
        (out * weights).sum().mul(out.numel() ** -0.5).backward()
        # A captured graph gives zeros where eager mode gives none.
        grads = [
            (torch.zeros_like(p) if p.grad is None else p.grad).flatten().float()
            for p in model.parameters()
        ]
        model.zero_grad(set_to_none=True)
        return {"output": out.detach(), "gradients": torch.cat(grads)}
    finally:
        torch.backends.cudnn.allow_tf32 = tf32
        with torch.no_grad():
            for buffer, then in buffers:
                buffer.copy_(then)


def flat(out: Any) -> Any:
    """Return all numbers that a network returns, in float32."""
    import torch

    leaves = [x for x in torch.utils._pytree.tree_leaves(out) if isinstance(x, torch.Tensor)]
    return torch.cat([x.float().flatten() for x in leaves])


def distance(a: Any, exact: Any) -> float:
    """Return the norm of the difference as a part of the norm; infinite with a NaN."""
    if a.shape != exact.shape or not a.isfinite().all():
        return float("inf")
    return float((a.double() - exact.double()).norm() / exact.double().norm().clamp_min(1e-12))


if __name__ == "__main__":
    sys.exit(main())
