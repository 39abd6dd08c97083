"""The package imports and trains without the features of Linux that other systems lack.

MindSpore has wheels for macOS and Windows. Neither system is at hand, so what they lack is taken away here.
"""

from __future__ import annotations

import pytest

from ms_accum.saving import files
from running import ROOT, run_python

# MindSpore and the standard library are imported first: they have their own ways on other systems. So has filelock,
# which calls os.fchmod here.
WITHOUT = """
import asyncio, ctypes, io, multiprocessing.context, os, runpy, shutil, signal, socket, subprocess, sys, tempfile
import mindspore, mindspore.dataset, numpy, safetensors.numpy, sklearn.datasets, filelock, tqdm
sys.path.insert(0, {root!r})

for name in ("fcntl", "grp", "pty", "pwd", "readline", "resource", "termios", "tty", "syslog"):
    sys.modules[name] = None
for name in (
    "alarm", "pthread_kill", "pthread_sigmask", "setitimer", "sigpending", "sigwait", "sigtimedwait", "siginterrupt",
    "SIGALRM", "SIGCHLD", "SIGHUP", "SIGKILL", "SIGPIPE", "SIGQUIT", "SIGSTOP", "SIGURG", "SIGUSR1", "SIGUSR2",
):
    vars(signal).pop(name, None)
for name in (
    "fchown", "fork", "getloadavg", "getpgid", "getpriority", "getresuid", "getsid", "killpg", "mkfifo",
    "nice", "posix_fadvise", "posix_spawn", "pread", "pwrite", "sched_getaffinity", "sched_setaffinity", "setpgid",
    "setsid", "statvfs", "sync", "sysconf", "uname", "wait4",
):
    vars(os).pop(name, None)

opened = io.open
def no_proc(path, *how, **options):
    if str(path).startswith(("/proc", "/sys", "/dev/shm")):
        raise FileNotFoundError(f"the program reads {{path}}")
    return opened(path, *how, **options)
io.open = __import__("builtins").open = no_proc

loaded = ctypes.CDLL
def no_libc(name, *how, **options):
    if name is None or str(name).endswith((".so", ".so.6")):
        raise OSError(f"the program loads {{name}}")
    return loaded(name, *how, **options)
ctypes.CDLL = no_libc
"""
TRAIN = """
quick = ("--model=mlp", "--batch_size=256", "--output_dir=out")
for program, *flags in (
    ("train.py", *quick, "--epochs=1", "--save_every=1"),
    ("train.py", *quick, "--epochs=2", "--resume"),
    ("eval.py", "--ckpt_path=out/gradient_accumulation.ckpt"),
):
    sys.argv = [program, *flags]
    try:
        runpy.run_path(os.path.join({root!r}, program), run_name="__main__")
    except SystemExit as end:
        print(program, "ended with", end.code)
"""


@pytest.mark.slow
def test_programs_train_save_resume_and_evaluate(tmp_path):
    done = run_python("-c", (WITHOUT + TRAIN).format(root=str(ROOT)), cwd=tmp_path)
    ends = [line for line in done.stdout.splitlines() if "ended with" in line]
    assert ends == [f"{program} ended with 0" for program in ("train.py", "train.py", "eval.py")], done.stderr


@pytest.mark.usefixtures("eager")
def test_unopenable_folder_is_not_flushed(monkeypatch, tmp_path):
    def cannot(path, mode):
        raise PermissionError(13, "Permission denied", str(path))

    monkeypatch.setattr(files.os, "open", cannot)
    files._flush_folder(str(tmp_path))
