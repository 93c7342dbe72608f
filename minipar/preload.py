"""What the fork server imports, once, so that no rank has to. Nobody else should import this."""

import gc
import importlib
from contextlib import suppress

MODULES = "rank cells mesh model dp tp pp zero precision recompute checkpoint corpus train"

importlib.import_module("torch._dynamo")  # every torch optimizer imports it: a second and 100 MB for each rank
for name in MODULES.split():
    with suppress(Exception):  # what is wrong with it, whoever imports it will read
        importlib.import_module(f"minipar.{name}")

gc.collect()
gc.freeze()  # ranks share these objects' memory as long as the garbage collector does not touch it
