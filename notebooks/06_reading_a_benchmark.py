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
# # Reading a benchmark honestly
# "Our kernel is 2.3 times as fast." Than what, on which problem, in which arithmetic, measured how, and is its result right?
# This notebook goes through the ways in which such a number misleads, each with something to run. The numbers of GPUs are read
# from recorded runs of this repository; what is timed here is timed on the CPU and used only to show how measuring goes wrong.

# %%
import math
import statistics
import time

import numpy as np

import cupy_convt3d as ct
from cupy_convt3d.backends.host import HostBackend
from cupy_convt3d.lab.bench import results
from cupy_convt3d.lab.bench.contest import compare
from cupy_convt3d.lab.bench.measure import Bench

recorded = results.newest("../benchmarks/results", "fp32")
rows = [row for row in recorded.rows if row.pass_name == "fprop" and row.dtype == "fp32"]
print(recorded.machine["device"], recorded.created[:10])

# %% [markdown]
# ## 1. Is it right?
# A kernel that writes a corner of the output is quick. This one (system 002 of `02_counterexamples`) beats a right kernel by
# far, and a test that compares a few elements, or allows an error of 1e-2 on one shape, may let it through.

# %%
bench = Bench(HostBackend(), budget_ms=50, against=())
problem = ct.Problem.parse("n1_c4to4_i16_k3")
wrong = ct.Kernel.from_file("../tests/specimens/s002_same_block_index.cu")
for row in compare(bench, "small", problem, "fprop", [ct.kernels()["fprop_gather"], wrong], "fp32"):
    print(f"{row.contender:24} {row.median_ms:7.2f} ms  {'WRONG' if row.wrong else 'right'}")

# %% [markdown]
# Every report of this package refuses to call a wrong kernel the quickest, and `ct.check` runs before any clock.
#
# ## 2. In which arithmetic?
# On recent GPUs a matrix product in TF32 is several times as quick as in fp32, and TF32 keeps 11 significant bits of each
# operand. Comparing a TF32 kernel with an fp32 one compares two different computations. What rounding the operands alone does
# to one sum of products, against the same sum in fp32:

# %%


def tf32(x):
    bits = x.astype(np.float32).view(np.uint32)
    return ((bits + 0x0FFF + ((bits >> 13) & 1)) & np.uint32(0xFFFFE000)).view(np.float32)  # round to nearest, ties to even


generator = np.random.default_rng(0)
print(f"{'terms':>6}  {'fp32 error':>11}  {'TF32 error':>11}   (of the sum of the magnitudes)")
for terms in (64, 512, 4096):
    a, b = generator.standard_normal((2, 200, terms), dtype=np.float32)
    exact, magnitude = np.einsum("ij,ij->i", a.astype(float), b.astype(float)), np.abs(a.astype(float) * b).sum(1)
    single = np.cumsum(a * b, axis=1, dtype=np.float32)[:, -1]
    rounded = np.einsum("ij,ij->i", tf32(a).astype(float), tf32(b).astype(float))
    print(f"{terms:6}  {np.abs((single - exact) / magnitude).max():11.1e}  {np.abs((rounded - exact) / magnitude).max():11.1e}")

# %% [markdown]
# So a speed comes with its precision and its error against fp64, or it says little. The error bound of the check is different
# for each arithmetic, for the same reason.
#
# ## 3. Against what?
# A ratio has two ends. A rival that is badly set up flatters everybody: cuDNN without its search
# (`torch.backends.cudnn.benchmark`), a debug build, a first call that compiles. The **floor** does not depend on a rival: the
# larger of useful FLOP over the measured rate of a matrix product, and compulsory bytes over the measured rate of a copy. Being
# twice as fast as a rival at 3% of the floor is still 6%.

# %%
print(f"{'problem':12}{'quickest of ours':20}{'rival / ours':>13}{'of floor':>10}{'rival, of floor':>17}")
for case in dict.fromkeys(row.case for row in rows):
    own = [row for row in rows if row.case == case]
    best = min((row for row in own if not row.is_rival and row.median_ms and not row.wrong), key=lambda row: row.median_ms)
    rival = next(row for row in own if row.is_rival)
    print(f"{case:12}{best.contender:20}{best.speedup:12.2f}x{best.share_of_floor:10.0%}{rival.share_of_floor:17.0%}")

# %% [markdown]
# ## 4. On which problem?
# Look at the column of ratios again. Whoever may choose the row may choose the headline. A summary that cannot be steered so is
# the geometric mean over a list that was fixed beforehand, together with the worst case:

# %%
ratios = {}
for row in rows:
    if not row.is_rival and row.speedup and not row.wrong:
        ratios.setdefault(row.contender, {})[row.case] = row.speedup
for name, values in ratios.items():
    best, worst = max(values, key=values.get), min(values, key=values.get)
    mean = math.exp(statistics.fmean(map(math.log, values.values())))
    print(f"{name:20} best {values[best]:.2f}x ({best}), geometric mean {mean:.2f}x, worst {values[worst]:.2f}x ({worst})")

# %% [markdown]
# The arithmetic mean of ratios is not a summary: the ratios 4 and 1/4 have the mean 2.1, whichever of two kernels is called the
# first.
#
# ## 5. Measured how?
# The first call compiles, loads and allocates. Later calls differ because something else used the machine, because clocks
# changed, because the data was still in a cache. Forty calls of one kernel:

# %%
kernel = ct.kernels()["fprop_gather"].replace_tunables(BLOCK_THREADS=96)  # a configuration that is not compiled yet
arrays = bench.arrays(problem, "fprop", "fp32")
started = time.perf_counter()
call = bench.prepared(kernel, problem, "fp32", arrays)
call()
first_ms = (time.perf_counter() - started) * 1e3
times = bench.backend.time(call, 40)
print(f"first call {first_ms:.2f} ms; then least {min(times):.2f}, median {statistics.median(times):.2f}, most {max(times):.2f} ms")

# %% [markdown]
# We give the median with the least and the most, count no first call, and on a GPU time with its own events and flush the cache
# before each call. What is not counted must be said: for kernels that want their weights repacked, that is a cost unless the
# packed weights are kept.
#
# ## 6. The best of many
# A tuner that measures many configurations and reports the quickest time reports its luck too. Sixty configurations that are
# all *equally* good, measured once each with 5% noise:

# %%
noise = np.random.default_rng(1).normal(1.0, 0.05, (2000, 60))
print(f"true time 1.00; the best of 60 looks like {noise.min(1).mean():.2f}")

# %% [markdown]
# So the winner is measured again before its time is quoted. The picture of all configurations tells how much tuning matters: a
# flat curve means that any will do. Here are some tiles of `fprop_tiled`, on the CPU, where the numbers mean nothing but their
# making is the same. A configuration that does not compile is part of the result:

# %%
trials = []
for voxels in (32, 64, 128):
    for channels in (16, 32, 48):
        configuration = {"TILE_VOXELS": voxels, "TILE_CHANNELS": channels}
        try:
            tiled = ct.kernels()["fprop_tiled"].replace_tunables(**configuration)
            trials.append((configuration, min(bench.milliseconds(bench.prepared(tiled, problem, "fp32", arrays)))))
        except ct.CompileError:
            trials.append((configuration, None))
ct.plots.tuning_landscape(trials)

# %% [markdown]
# ## 7. Of what machine?
# A ceiling is a measurement and can be wrong like any other. A matrix product on constant operands switches fewer transistors
# and can run at a higher clock than on random ones; a ceiling taken so makes every kernel look worse. A ceiling from a data
# sheet makes it look worse still. And a time without device, driver, versions and commit cannot be compared with next year's.
# The recorded run:

# %%
for key, value in recorded.machine.items():
    print(f"{key:14} {value}")
print(f"copy           {recorded.ceilings.copy_bytes_per_s / 1e12:.2f} TB/s")
for dtype, rate in recorded.ceilings.gemm_flop_per_s.items():
    print(f"GEMM {dtype:9} {rate / 1e12:.1f} TFLOP/s")

# %% [markdown]
# ## 8. Far below the bound
# Being right has a number too. The histogram shows the errors of random problems over the bound that is derived from the
# arithmetic; a kernel that adds up in a bad order, or rounds where it should not, moves to the right long before it fails.

# %%
checked = {name: ct.check(name, backend="host", examples=150, dtypes=["fp32"]).ratios for name in ("fprop_gather", "fprop_tiled")}
ct.plots.error_histogram(checked)

# %% [markdown]
# ## A checklist
# A speed is worth repeating if it says: the problem and all its parameters; right by which test; the arithmetic and the error;
# the rival, its version and settings; the floor; the spread; what was not counted; device, driver, versions, commit; and the
# command that measures it again.
