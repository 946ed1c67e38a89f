// Mistake: sums are added in no fixed order, yet the kernel says it gives the same bits each time.
/* convt3d
pass = "fprop"
dtypes = ["fp32"]
[[launch]]
grid = "output_numel"
block = 64
*/
// A block owns one output; its threads share the products of all channels and taps and add them up in shared memory.
extern "C" __global__ void specimen(const float* input, const float* weight, const float* bias, float* output, int batch,
                                    int in_channels, int out_channels, int groups, int input_d, int input_h, int input_w,
                                    int output_d, int output_h, int output_w, int kernel_d, int kernel_h, int kernel_w,
                                    int stride_d, int stride_h, int stride_w, int padding_d, int padding_h, int padding_w,
                                    int output_padding_d, int output_padding_h, int output_padding_w, int dilation_d,
                                    int dilation_h, int dilation_w) {
  __shared__ float total;
  const int thread = threadIdx.x, out_per_group = out_channels / groups, in_per_group = in_channels / groups;
  const int number = blockIdx.x, w = number % output_w, h = number / output_w % output_h;
  const int d = number / (output_w * output_h) % output_d, taps = kernel_d * kernel_h * kernel_w;
  const int co = number / (output_w * output_h * output_d) % out_channels;
  const int n = number / (output_w * output_h * output_d) / out_channels, first = co / out_per_group * in_per_group;
  if (thread == 0) total = bias != nullptr ? bias[co] : 0.0f;
  __syncthreads();
  float sum = 0;
  for (int product = thread; product < in_per_group * taps; product += 64) {
    const int ci = first + product / taps, tap = product % taps;
    const int td = tap / (kernel_h * kernel_w), th = tap / kernel_w % kernel_h, tw = tap % kernel_w;
    const int id = d + padding_d - td * dilation_d, ih = h + padding_h - th * dilation_h, iw = w + padding_w - tw * dilation_w;
    if (id < 0 || ih < 0 || iw < 0 || id % stride_d != 0 || ih % stride_h != 0 || iw % stride_w != 0) continue;
    const int jd = id / stride_d, jh = ih / stride_h, jw = iw / stride_w;
    if (jd >= input_d || jh >= input_h || jw >= input_w) continue;
    sum += input[(((n * in_channels + ci) * input_d + jd) * input_h + jh) * input_w + jw] *
           weight[(ci * out_per_group + co % out_per_group) * taps + tap];
  }
  atomicAdd(&total, sum);
  __syncthreads();
  if (thread == 0) output[number] = total;
}
