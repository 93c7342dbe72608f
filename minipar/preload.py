"""What the fork server imports, once, so that no rank has to. Nobody else should import this."""

import gc
import importlib
import os
import threading
from contextlib import suppress

MODULES = "rank cells mesh model dp tp pp zero precision recompute checkpoint corpus train"


def end_with(launcher: int, loaded: threading.Event) -> None:
    """Until all is loaded, end this process when the launcher ends: later it notices by itself."""
    while not loaded.wait(0.1):
        if os.getppid() != launcher:
            os._exit(1)


loaded = threading.Event()
watch = threading.Thread(target=end_with, args=(os.getppid(), loaded), daemon=True)
watch.start()

importlib.import_module("torch._dynamo")  # every torch optimizer imports it: a second and 100 MB for each rank
for name in MODULES.split():
    with suppress(Exception):  # what is wrong with it, whoever imports it will read
        importlib.import_module(f"minipar.{name}")

loaded.set()
watch.join()  # a process with threads should not fork

gc.collect()
gc.freeze()  # ranks share these objects' memory as long as the garbage collector does not touch it
