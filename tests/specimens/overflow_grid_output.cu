// Mistake: the index of an output is 32-bit, in a grid whose y is the channel and whose z is the volume.
/* convt3d
pass = "fprop"
dtypes = ["fp32"]
[[launch]]
grid = ["ceil_div(output_voxels, 128)", "out_channels", "batch"]
block = 128
*/
__device__ int input_index(int o, int t, int size, int stride, int padding, int dilation) {
  const int moved = o + padding - t * dilation;
  if (moved < 0 || moved % stride != 0) return -1;
  return moved / stride < size ? moved / stride : -1;
}

extern "C" __global__ void specimen(const float* input, const float* weight, const float* bias, float* output, int in_channels,
                                    int out_channels, int groups, int input_d, int input_h, int input_w, int output_d,
                                    int output_h, int output_w, int kernel_d, int kernel_h, int kernel_w, int stride_d,
                                    int stride_h, int stride_w, int padding_d, int padding_h, int padding_w, int dilation_d,
                                    int dilation_h, int dilation_w) {
  const long long voxel = 1LL * blockIdx.x * blockDim.x + threadIdx.x;
  if (voxel >= 1LL * output_d * output_h * output_w) return;
  const int w = voxel % output_w, h = voxel / output_w % output_h, d = voxel / output_w / output_h;
  const int co = blockIdx.y, n = blockIdx.z, inputs = in_channels / groups, outputs = out_channels / groups;
  const int first = co / outputs * inputs;
  float sum = bias != nullptr ? bias[co] : 0;
  for (int td = 0; td < kernel_d; ++td) {
    const int id = input_index(d, td, input_d, stride_d, padding_d, dilation_d);
    for (int th = 0; th < kernel_h; ++th) {
      const int ih = input_index(h, th, input_h, stride_h, padding_h, dilation_h);
      for (int tw = 0; tw < kernel_w; ++tw) {
        const int iw = input_index(w, tw, input_w, stride_w, padding_w, dilation_w);
        if (id < 0 || ih < 0 || iw < 0) continue;
        for (int ci = first; ci < first + inputs; ++ci) {
          const long long x = (((1LL * n * in_channels + ci) * input_d + id) * input_h + ih) * input_w + iw;
          const long long tap =
              ((1LL * ci * outputs + co % outputs) * kernel_d + td) * kernel_h * kernel_w + th * kernel_w + tw;
          sum += input[x] * weight[tap];
        }
      }
    }
  }
  const int y = (((n * out_channels + co) * output_d + d) * output_h + h) * output_w + w;
  output[y] = sum;
}
