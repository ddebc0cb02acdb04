"""Two arrays and two children, the first of which breaks every transfer: move, find out, go on elsewhere."""

import os
from array import array

from kvbelay.core.model import BatchId, BlockSpan, Fingerprint, TransferBatch
from kvbelay.runtime.config import decode_config, open_belay

breaking = {"connector": "memory", "plan": {"strikes": [{"fault": "corrupt", "rate": 1.0, "times": 99}]}}
children = [
    {"name": "near", "connector": "faulty", "config": breaking},
    {"name": "spare", "connector": "memory", "config": {"store": "spare"}},
]
model = Fingerprint(model="two arrays", revision="1", layouts=())
belay = open_belay(decode_config({"children": children}, source="here"), model, source="here")


def first_64_tokens(memory: bytearray) -> list[TransferBatch]:
    """One batch: four blocks of 1 KiB, wherever they lie in the memory."""
    blocks = BlockSpan(memoryview(memory), offsets=array("Q", [3072, 0, 2048, 1024]), nbytes=1024)
    tokens = BatchId(model.digest(), start=0, stop=64, layers=(0, 1), prefix=b"hash of the prompt")
    return [TransferBatch(tokens, request="", epoch=0, spans=(blocks,))]


prefill, decode = bytearray(os.urandom(4096)), bytearray(4096)
saved = belay.save("request 1", first_64_tokens(prefill), within_s=1.0)
outcome = belay.load("request 1", saved.tickets, first_64_tokens(decode), within_s=1.0)

print(f"{outcome.result.value} by {outcome.child!r} in {outcome.attempts} attempts: {outcome.watermark} tokens good")
for failure in outcome.failures:
    print(f"{failure.child!r} failed before: {failure.detail}")
print("the arrays are equal" if prefill == decode else "the arrays differ")
belay.close()
