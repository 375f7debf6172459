"""A CUDA device made of host memory. See docs/decisions/fake-cuda-device.md.

A fault is:

* a tensor of the host beside those of the device (it raises), or over NCCL;
* a non-blocking copy between the device and memory that is not pinned;
* memory that is given back while a side stream or an exchange still uses it;
* bytes that a stream or the host uses before it has waited for another one that writes them, or writes before it has
  waited for another one that reads them (order.py);
* a result that somebody writes to while it is under way;
* an exchange, or work of a side stream, that nobody waits for;
* a worker thread that waits for anything but an event;
* another order of a communicator's operations, or a message without its other end (logs.py): on NCCL, a hang.

Not seen: the reduce operator is not in the log; object collectives go over gloo as tensors of the host; what the host
does to pinned memory beside torch (numpy, files) shows in numbers alone; two threads of the host count as one, so what
one has waited for is over for the other. A side stream that allocates is refused.
What is sent outside of a batch leaves when its rank stands still for another one: NCCL would have sent it by then.
"""
