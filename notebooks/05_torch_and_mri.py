# ---
# jupyter:
#   jupytext:
#     formats: ipynb,py:percent
#     text_representation:
#       extension: .py
#       format_name: percent
#   kernelspec:
#     display_name: Python 3
#     language: python
#     name: python3
# ---

# %% [markdown]
# # torch, DLPack, and a U-Net on a real volume
# The package takes arrays of NumPy, CuPy, torch and JAX and gives back the same kind. This notebook passes one volume between
# them, upsamples it, and then swaps the transposed convolutions of a 3D U-Net for ours. The volume is a magnetic resonance
# image that `nibabel` ships for its tests. With a GPU everything below runs on it; without one the same kernels run on the CPU.

# %%
import copy

import numpy as np
import torch

import cupy_convt3d as ct
from cupy_convt3d.lab.mri import mri_volume, trilinear, trilinear_weight

gpu = torch.cuda.is_available()
if gpu:
    torch.backends.cudnn.conv.fp32_precision = "ieee"  # torch's default rounds to TF32; here like is compared with like
device, backend = ("cuda", None) if gpu else ("cpu", "host")  # for torch's CPU tensors the default is torch's own operator
volume = mri_volume()
print(volume.shape, volume.dtype, device)

# %% [markdown]
# ## One memory, several libraries
# DLPack is the protocol by which array libraries hand memory to each other. `torch.from_numpy` and `np.from_dlpack` share it;
# nothing is copied, as the addresses show.

# %%
tensor = torch.from_numpy(volume)
back = np.from_dlpack(tensor)
print(volume.ctypes.data == tensor.data_ptr() == back.ctypes.data)

# %% [markdown]
# `ct.conv_transpose3d` reads each library's memory where it is and allocates the result with that library's own allocator, on
# its device and stream. The numbers are the same to the last bit, because the same kernel makes them.

# %%
weight = np.random.default_rng(0).standard_normal((1, 2, 3, 3, 3), dtype=np.float32)
small = np.ascontiguousarray(volume[None, None, 8:14, 40:50, 60:70])
from_numpy = ct.conv_transpose3d(small, weight, stride=2, padding=1)
from_torch = ct.conv_transpose3d(torch.from_numpy(small), torch.from_numpy(weight), stride=2, padding=1, backend="host")
print(type(from_numpy).__name__, type(from_torch).__name__, (from_torch.numpy() == from_numpy).all())

# %% [markdown]
# `out=` writes into memory that you own, a slice of a larger tensor for example, with any strides:

# %%
canvas = torch.zeros(1, 4, *from_torch.shape[2:])
ct.conv_transpose3d(torch.from_numpy(small), torch.from_numpy(weight), stride=2, padding=1, backend="host", out=canvas[:, 1:3])
print([int(canvas[:, c].count_nonzero()) > 0 for c in range(4)])

# %% [markdown]
# ## Upsampling as a transposed convolution
# Trilinear interpolation by 2 is linear, and the same everywhere, so it is a transposed convolution: stride 2, padding 1 and
# the weight (1/4, 3/4, 3/4, 1/4) on each axis. Kernel 4 is a multiple of stride 2, so each output inside
# the volume sums eight products and there is no checkerboard. At the border the two differ by definition: interpolation repeats
# the edge, a transposed convolution sees zeros beyond it.

# %%
source = torch.from_numpy(volume[None, None]).to(device)
upsampled = ct.conv_transpose3d(source, torch.from_numpy(trilinear_weight()).to(device), stride=2, padding=1, backend=backend)
result = upsampled[0, 0].cpu().numpy()
inside = (slice(1, -1),) * 3
error = np.abs(result[inside] - trilinear(volume)[inside]).max() / np.abs(volume).max()
print(result.shape, f"largest difference inside to torch's interpolation, of the largest value: {error:.1e}")
assert error < 1e-6
ct.plots.volume_slices(volume, result)

# %% [markdown]
# ## A U-Net
# A small one with two levels. Its decoder uses kernel 2 with stride 2: each input voxel owns a block of 2 × 2 × 2 outputs. The
# weights are random; what matters here is that the numbers stay the same.

# %%


def block(channels_in, channels_out):
    return torch.nn.Sequential(
        torch.nn.Conv3d(channels_in, channels_out, 3, padding=1), torch.nn.InstanceNorm3d(channels_out), torch.nn.ReLU()
    )


class UNet(torch.nn.Module):
    def __init__(self, width=4):
        super().__init__()
        self.enter = block(1, width)
        self.down = torch.nn.ModuleList([block(width, 2 * width), block(2 * width, 4 * width)])
        self.up = torch.nn.ModuleList(
            [torch.nn.ConvTranspose3d(4 * width, 2 * width, 2, stride=2), torch.nn.ConvTranspose3d(2 * width, width, 2, stride=2)]
        )
        self.merge = torch.nn.ModuleList([block(4 * width, 2 * width), block(2 * width, width)])
        self.leave = torch.nn.Conv3d(width, 1, 1)

    def forward(self, x):
        levels = [self.enter(x)]
        for down in self.down:
            levels.append(down(torch.nn.functional.max_pool3d(levels[-1], 2)))
        x = levels.pop()
        for up, merge in zip(self.up, self.merge, strict=True):
            x = merge(torch.cat([levels.pop(), up(x)], dim=1))
        return self.leave(x)


torch.manual_seed(0)
theirs = UNet().to(device)
ours = copy.deepcopy(theirs)

# %% [markdown]
# `ct.nn.convert` swaps every `ConvTranspose3d` in place and says what it swapped and what it left. Parameters and their names
# do not change, so checkpoints fit both ways.

# %%
print(ct.nn.convert(ours, backend=backend))
assert ours.state_dict().keys() == theirs.state_dict().keys()

# %%
scan = (source - source.mean()) / source.std()
with torch.no_grad():
    expected, got = theirs(scan), ours(scan)
print(tuple(got.shape), f"largest difference {(got - expected).abs().max():.1e}, largest value {expected.abs().max():.2f}")
assert torch.allclose(got, expected, atol=1e-4)

# %% [markdown]
# ## Training
# Both gradients come from our kernels as well. Two copies of the model learn to remove noise from a part of the volume, one
# with torch's operator and one with ours, from the same start:

# %%
patch = scan[..., 4:20, 32:64, 48:80]
noisy = patch + 0.5 * torch.randn(patch.shape, generator=torch.Generator().manual_seed(1)).to(device)


def train(model, steps=6):
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-2)
    losses = []
    for _ in range(steps):
        optimizer.zero_grad()
        loss = torch.nn.functional.mse_loss(model(noisy), patch)
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    return losses


loss_theirs, loss_ours = train(theirs), train(ours)
print("torch", " ".join(f"{loss:.5f}" for loss in loss_theirs))
print("ours ", " ".join(f"{loss:.5f}" for loss in loss_ours))
assert np.allclose(loss_theirs, loss_ours, rtol=1e-2) and loss_ours[-1] < loss_ours[0]

# %% [markdown]
# The last digits may part after some steps, as they do between two versions of any library: sums are added up in another order,
# and training amplifies the difference. Our kernels give the same bits from run to run.
#
# Next: `06_reading_a_benchmark`, on what a claim such as "twice as fast as cuDNN" has to say.
