"""How far two computations of the same thing may differ. All relative. Never relaxed to make a test pass."""

FP32_LOSS = 1e-5  # per-step loss of two layouts of one fp32 run, over 20 steps
FP32_GRAD_NORM = 1e-4  # per-step gradient norm of the same
TOKEN_LOSS = 1e-6  # loss and gradients of the output layer in tiles against full logits, fp32
# one sequence over several ranks against one process: first step's gradient norm in fp32; in bf16 that and each loss
CONTEXT_GRAD_NORM = 1e-6
CONTEXT_BF16 = 1e-3
PLACEMENT_LOSS = 1e-6  # per-step loss of an fp32 run whose experts' copies take part, against the static run's
BF16_LOSS = 1e-2  # per-step loss of two layouts of one bf16 run, over 20 steps
ORACLE_LOGITS = 1e-5  # fp32 logits against the Hugging Face implementation of the same weights
ORACLE_GRADS = 1e-4  # fp32 loss and gradients against the same
# outputs and every gradient of an MoE layer against a loop over tokens in fp64
MOE = {"float64": 1e-10, "float32": 1e-5, "bfloat16": 1e-2}
# outputs and gradients of attention over slices against a masked softmax in fp64; kernels for AVX2 are at 1.2e-6
SLICES = {"float32": 3e-6, "bfloat16": 1e-2, "float16": 2e-3}
# A half-precision step on the pretended device against the CPU's: other kernels round their sums at other places.
PRETENDED_HALF_LOSS = 2e-4  # after two updates; before them 1e-5 is seen
PRETENDED_HALF_GRAD_NORM = 5e-3
