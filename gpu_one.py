import sys, json, numpy as np, torch, cupy
from cupy_convt3d.lab.suites import suite
from cupy_convt3d.registry import kernels
from cupy_convt3d.backends.cuda import CudaBackend
from cupy_convt3d.lab.measure import Bench
k=kernels()[sys.argv[1]]; dt=sys.argv[2]; p=suite("named")[sys.argv[3]]
B=CudaBackend(); b=Bench(B); a=b.arrays(p,"fprop",dt); f=b.prepared(k,p,dt,a); f(); B.synchronize(); f(); B.synchronize()
