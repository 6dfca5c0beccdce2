"""What the server of ranks does once for all of them, besides importing modules: it reads the
machines that ship, in which every new group of a rank looks for its host, and takes what it has
imported out of sight of the collectors of its forks, which would copy all of it by reading it."""

import gc

from ficco.machine import Fingerprint, nearest

nearest(Fingerprint("none", 1))
gc.freeze()
