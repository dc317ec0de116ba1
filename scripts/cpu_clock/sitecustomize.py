"""Makes limits of time count CPU seconds of the process: a search on a busy machine ends as on an idle one."""

import time

time.monotonic = time.perf_counter = time.process_time
