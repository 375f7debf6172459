// What asks NVIDIA's driver how many GPUs there are, without torch, finds one: libcuda.so.1 of tests/cuda/run.py.
extern "C" {
int cuInit(unsigned) { return 0; }
int cuDeviceGetCount(int* count) {
  *count = 1;
  return 0;
}
}
