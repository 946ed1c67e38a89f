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
# # The ladder: from scatter to tensor cores
# The registered kernels compute the same thing and differ by large factors in speed. This notebook goes through them rung by
# rung: what each one does with its threads, how much work it wastes, and how near the hardware's limit it comes. It reads
# whatever is registered, so a new kernel appears here by itself.
#
# A time measured on a CPU says nothing about a GPU. Where there is no GPU, the speeds below come from a recorded run whose
# device and date are printed; where there is one, they are measured here.

# %%
import math

import cupy_convt3d as ct
from cupy_convt3d.backends.cuda import available
from cupy_convt3d.lab.bench import results
from cupy_convt3d.lab.bench.contest import compare
from cupy_convt3d.lab.bench.measure import Bench, measure_ceilings

# %% [markdown]
# ## How little there is to do
# A kernel must do the useful multiply-adds, and it must read every input and write every output once. Everything else is waste.
# The ratio of the two, the *arithmetic intensity* in FLOP per byte, says which of them will be the limit:

# %%
print(f"{'problem':12}{'GFLOP':>9}{'MB':>9}{'FLOP / byte':>13}")
for name, problem in ct.suites.suite("named").items():
    moved = problem.compulsory_bytes(4)
    print(f"{name:12}{problem.flop / 1e9:9.1f}{moved / 1e6:9.0f}{problem.flop / moved:13.0f}")

# %% [markdown]
# A GPU that computes 50 TFLOP/s in fp32 and copies 4 TB/s needs more than 12 FLOP for each byte to keep its arithmetic busy.
# Nearly all of these layers are far above that, *if* each byte is fetched once. A thread that fetches both operands of every
# product from memory does 2 FLOP for 8 bytes. Closing the gap between 0.25 and the numbers above is what the rungs of the
# ladder are about.

# %% [markdown]
# ## The rungs
# Each kernel file says in its first lines what a thread and a block do. In the order of their names, the forward kernels:

# %%
for name, kernel in ct.kernels("fprop").items():
    body = kernel.source.partition("*/")[2].lstrip().splitlines()
    comment = [line for line in body[: next(i for i, line in enumerate(body) if not line.startswith("//"))]]
    print(f"=== {name} ({', '.join(kernel.dtypes)}{'' if kernel.deterministic else '; not deterministic'})")
    print("\n".join(line.removeprefix("//").removeprefix(" ") for line in comment), end="\n\n")

# %% [markdown]
# **Scatter** is the definition. A thread owns an input and adds into the outputs. Neighbouring inputs hit the same outputs, so
# the additions must be atomic, and their order changes from run to run.
#
# **Gather** turns it round. A thread owns an output, and nobody else writes it: no atomics, one store, the same bits each time.
# The price: it must ask of every tap whether it reaches the output. How many of these questions are in vain?

# %%
print(f"{'problem':12}{'taps asked':>14}{'taps used':>14}{'wasted':>9}")
for name, problem in ct.suites.suite("named").items():
    asked = math.prod(problem.output_size) * math.prod(problem.kernel_size)
    used = math.prod(problem.live_pairs(axis) for axis in range(3))
    print(f"{name:12}{asked:14,}{used:14,}{1 - used / asked:9.0%}")

# %% [markdown]
# With stride 2 seven of eight. **Residue classes** remove the question: all outputs with the same `(o + padding) mod stride`
# have the same list of taps, so a block that stays within one class runs over that list and nothing else.

# %%
ct.plots.residue_classes(ct.Problem(1, 1, 1, (4, 5, 7), 3, stride=2, padding=1))

# %% [markdown]
# **Tiles** attack the other waste, memory. Within a class the problem is a matrix product: outputs of the class × output
# channels, summed over taps × input channels. A block stages a tile of both operands in shared memory, and each thread keeps a
# small rectangle of sums in registers. A staged value is then used as often as the tile is wide.
#
# **Tensor cores** multiply small matrices in one instruction, from registers or shared memory, in fp16, bf16 or TF32 with fp32
# sums. The matrix product inside a residue class suits them as it is. TF32 rounds each operand to 11 significant bits;
# splitting an fp32 operand in two TF32 numbers and adding three products gives fp32 accuracy back. Whether a kernel of this
# kind is registered shows in the list above.

# %% [markdown]
# ## They are all right
# Speed comes after. A quick check of every rung, in fp32, on the host, so that it works without a GPU:

# %%
for kernel in ct.kernels("fprop").values():
    if "fp32" in kernel.dtypes:
        report = ct.check(kernel, backend="host", examples=30, dtypes=["fp32"])
        print(str(report).splitlines()[0])
        assert report.passed

# %% [markdown]
# ## The roofline
# The roof has two parts, both measured in the same run as the kernels: the rate of a large copy (the slope) and the rate of a
# large matrix product (the flat part). A kernel under the slope lacks bandwidth, one under the flat part lacks arithmetic; its
# distance to the roof is what is left to gain.

# %%
if available():
    from cupy_convt3d.backends.cuda import CudaBackend

    bench = Bench(CudaBackend(), budget_ms=100)
    machine, ceilings, rows = bench.backend.capabilities()["device"] + ", measured now", measure_ceilings(bench), []
    able = [kernel for kernel in ct.kernels("fprop").values() if "fp32" in kernel.dtypes]
    for case in ("kb61", "kb73", "kb77", "unet_up1"):
        rows += compare(bench, case, ct.suites.suite("named")[case], "fprop", able, "fp32", ceilings)
else:
    recorded = results.newest("../benchmarks/results", "fp32")
    machine, ceilings = f"{recorded.machine['device']}, recorded {recorded.created[:10]}", recorded.ceilings
    rows = [row for row in recorded.rows if row.pass_name == "fprop" and row.dtype == "fp32"]
print(machine)
ct.plots.roofline(rows, ceilings)

# %% [markdown]
# The same rows as rates. The red line is the floor of each problem: the larger of its FLOP over the one ceiling and its bytes
# over the other.

# %%
shown = ("kb61", "kb73", "kb77", "unet_up1")
ct.plots.speed_bars([row for row in rows if row.case in shown])

# %% [markdown]
# And as a table, from the slowest rung to the quickest, by the geometric mean of their shares of the floor:

# %%
shares = {}
for row in rows:
    if row.share_of_floor and not row.wrong:
        shares.setdefault(row.contender, []).append(row.share_of_floor)
print(f"on {machine}, fp32")
for name, values in sorted(shares.items(), key=lambda item: math.prod(item[1]) ** (1 / len(item[1]))):
    mean = math.prod(values) ** (1 / len(values))
    print(f"{name:24} {mean:6.1%} of the floor on average, best {max(values):6.1%}, worst {min(values):6.1%} ({len(values)} problems)")

# %% [markdown]
# Two things to look for. A rung may be slower than the one below it on *some* problem: a tile that is half empty wastes more
# than it saves. And no rung is near the roof everywhere, which is why a library holds several kernels and a rule to choose.
#
# `convt3d report` makes these pictures for your machine. `06_reading_a_benchmark` is about what they do and do not prove.
