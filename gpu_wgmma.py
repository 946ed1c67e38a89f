import sys, json, os, time, statistics, multiprocessing as mp
import numpy as np
CASES="kb58 kb61 kb68 kb70 kb72 kb73 kb77 unet_up2 unet_up1 gan_4s2p1 vae_3s2".split()
DT="tf32 tf32x3 bf16 fp16".split()
KERNEL=os.environ.get("KERNEL","fprop_rolling_wgmma")
VARIANTS=json.loads(os.environ.get("VARIANTS","[{}]"))
from cupy_convt3d.lab.suites import suite
from cupy_convt3d.registry import kernels
from cupy_convt3d.source import Instance
S=suite("named")
SMALL="n2_c5to7_i5x6x7_k3_s2_p1_op1_bias n1_c16to24_i9x10x11_k3_p1 n2_c20to17_i4x5x6_k4_s2_p1 n1_c8to8_i6_k3_s2_p1_d2_bias n3_c4to6_i3x4x5_k2_s2_g2 n1_c3to2_i4x3x5_k1x2x3_s3x1x2_op1x0x1_bias n1_c33to9_i6x17x19_k2x5x3_s1x2x1_p1x2x1".split()
def comp(a):
    from cupy_convt3d.backends.nvrtc import compile_cubin
    v,dt,sp=a
    k=kernels()[KERNEL].replace_tunables(**v)
    try: compile_cubin(Instance(k,dt,sp),"sm_90a")
    except Exception as e: return str(e)[:500]
def main():
    from cupy_convt3d.problem import Problem
    dts=sys.argv[1].split(","); cases=sys.argv[2].split(",") if len(sys.argv)>2 and sys.argv[2] else CASES
    small=[Problem.parse(x) for x in SMALL] if "check" in sys.argv[3:] else []
    jobs=set()
    ks=[(v,kernels()[KERNEL].replace_tunables(**v)) for v in VARIANTS]
    for v,k in ks:
        for dt in dts:
            if dt not in k.dtypes: continue
            for p in [S[c] for c in cases]+(small if v==VARIANTS[0] else []):
                if k.why_not(p,dt) is None: jobs.add((json.dumps(v),dt,k.plan(p,dt,132).specialization))
    t=time.time()
    with mp.get_context("spawn").Pool(15) as pool:
        for r in pool.map(comp,[(json.loads(v),dt,sp) for v,dt,sp in jobs],chunksize=1):
            if r: print(r)
    print(f"compiled {len(jobs)} in {time.time()-t:.0f} s",flush=True)
    import torch, cupy
    from cupy_convt3d.backends.cuda import CudaBackend
    from cupy_convt3d.backends.base import Arguments, TensorRef
    from cupy_convt3d.lab.verify import verify
    from cupy_convt3d.lab.measure import _reference
    B=CudaBackend(); print(B.capabilities()["device"])
    for p in small:
        for dt in dts:
            for v,k in ks[:1]:
              for kind in ("exact","random"):
                if k.why_not(p,dt): print(k.why_not(p,dt)); continue
                o=verify(B,k,p,dt,kind,1)
                if not o.ok: print("WRONG",p,dt,kind,o.message,o.index,o.expected,o.got)
    print("checked",flush=True)
    torch.backends.cudnn.benchmark=True
    med=statistics.median
    def tm(f,n=15): return med(B.time(f,n))
    rows=[]
    for dt in dts:
        prec={"tf32":"tf32"}.get(dt,"ieee")
        torch.backends.cudnn.conv.fp32_precision=prec
        tdt={"bf16":torch.bfloat16,"fp16":torch.float16}.get(dt,torch.float32)
        rate={"tf32":367e12,"tf32x3":122e12,"bf16":785e12,"fp16":736e12,"fp32":51.5e12}[dt]
        for c in cases:
            p=S[c]
            x=torch.randn(p.input_shape,device="cuda").to(tdt); w=(torch.randn(p.weight_shape,device="cuda")).to(tdt)
            call=lambda x,w: torch.nn.functional.conv_transpose3d(x,w,None,p.stride,p.padding,p.output_padding,p.groups,p.dilation)
            ref=call(x,w); t1=tm(lambda: call(x,w),8 if ref.numel()*1>0 else 8)
            xl,wl=x.contiguous(memory_format=torch.channels_last_3d),w.contiguous(memory_format=torch.channels_last_3d)
            t2=tm(lambda: call(xl,wl),8)
            isz=2 if dt in("bf16","fp16") else 4
            floor=max(p.flop/rate, p.compulsory_bytes(isz,"fprop")/3.0e12)*1e3
            line=f"{dt:7s}{c:10s} cudnn {t1:7.3f}/{t2:7.3f} floor {floor:6.3f}"
            for (v,k) in ks:
              for lay,(xx,ww) in {"n":(x,w),"l":(xl,wl)}.items():
                why=k.why_not(p,dt,B.arch)
                if why: line+=f" | {why}"; continue
                y=torch.full_like(ref,float("nan")) if lay=="n" else torch.full_like(ref,float("nan")).contiguous(memory_format=torch.channels_last_3d)
                plan=k.plan(p,dt,B.multiprocessors); mod=B.compile(B.instance(k,dt,plan))
                ws={n:cupy.zeros(max(1,s),np.float32) for n,s in plan.workspace.items()}
                R=lambda t: TensorRef(t.data_ptr(),tuple(t.shape),tuple(t.stride()))
                refs={"input":R(xx),"weight":R(w),"output":R(y),**{n:_reference(a) for n,a in ws.items()}}
                L=[(s,Arguments(s,p,refs)) for s in plan.launches]
                st=0
                def run(pack):
                    for s,a in L:
                        if pack or not s.packs: mod.launch(s,a,st,0)
                try:
                    torch.cuda.synchronize(); run(True); B.synchronize()
                    tp=tm(lambda: run(True)); tn=tm(lambda: run(False))
                    err=float((y.float()-ref.float()).norm()/ref.float().norm())
                    line+=f" | {lay} {tn:.3f}+{tp-tn:.3f} {t1/tn:.2f}x {min(t1,t2)/tn:.2f}x {floor/tn*100:.0f}% e{err:.1e}"
                    rows.append(dict(dt=dt,case=c,variant=v,layout=lay,ms=tn,ms_pack=tp,cudnn=t1,cudnn_cl=t2,floor=floor,err=err))
                except Exception as e: line+=f" | {str(e)[:200]}"
            print(line,flush=True)
            del x,w,xl,wl,ref
    json.dump(rows,open(os.path.join(os.environ.get("OUT","."),f"rows_{KERNEL}.json"),"w"))
    for dt in dts:
        for i,(v,k) in enumerate(ks):
            r=[q for q in rows if q["dt"]==dt and q["variant"]==v and q["layout"]=="n"]
            if r: print(dt,v,len(r),"geomean vs nchw %.2f better %.2f floor %.2f"%tuple(np.exp(np.mean(np.log(z))) for z in ([q["cudnn"]/q["ms"] for q in r],[min(q["cudnn"],q["cudnn_cl"])/q["ms"] for q in r],[q["floor"]/q["ms"] for q in r])))
if __name__=="__main__": main()
