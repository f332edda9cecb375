"""kvstate through ctypes: nothing to install, numpy only if it is there.

The library is the one that KVSTATE_LIB names, or else the newest one under target/.

Calls that fail raise KvsError, which carries the status and the library's own reason. States are bytes; whatever
supports the buffer protocol (bytes, bytearray, memoryview, numpy arrays) is taken back. What has a close frees its
memory then, or at the end of a with. Results have the names of kvstate.h, which says more of each call.
"""

from ._library import KvsError
from .autosave import Autosave, AutosavedSlot, Restored
from .checkpoints import Checkpoint, Checkpoints, CheckpointVerdict, Resumed
from .constants import *
from .context import Context, LoadedRange, RewindObstacle
from .devices import PinnedBuffer, device_check
from .jobs import Job
from .sections import Dsv4, Kv, Layer, Recurrent, RecurrentLayer, Shared, row_size
from .slot_files import SlotCheckpoint, SlotIdentity, SlotResult, fingerprint, slot_load, slot_save, slot_save_start
from .snapshots import Snapshot
