"""A CUDA device made of host memory. See docs/decisions/pretended-gpu.md.

A fault is:

* a tensor of the host beside those of the device (it raises), or over NCCL;
* a non-blocking copy between the device and memory that is not pinned;
* memory that is given back while a side stream or an exchange still uses it;
* a side stream that did not wait for the default stream, where that one wrote or allocated;
* a result that somebody writes to while it is under way;
* an exchange, or a copy on a side stream, that nobody waits for;
* a worker thread that waits for anything but an event;
* another order of a communicator's operations, or a message without its other end (logs.py): on NCCL, a hang.

Not seen: the reduce operator is not in the log; object collectives go over gloo as tensors of the host; a host that
reads what a side stream has copied, where only another stream has waited for it; memory that a side stream allocated.
What is sent outside of a batch leaves when its rank stands still for another one: NCCL would have sent it by then.
"""
