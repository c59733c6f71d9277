"""A node of a cluster: containerd, kubelet and kube-proxy in namespaces of their own.

A machine has its own network, processes, mounts, host name and cgroups. ``/run``, ``/var/lib`` and
``/var/log`` are its own, so its programs have their usual paths and two machines don't meet. When its first
process ends, Linux ends all others, and their mounts are gone.
"""

from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
from pathlib import Path

from testing.cluster import cgroups
from testing.cluster.network import CONTROL_PLANE, PODS, Host
from testing.conditions import TIMEOUT_S, wait_until
from testing.kubernetes.process import Process, find_program

PROGRAMS = ("containerd", "ctr", "runc", "kubelet", "kube-proxy", "iptables", "conntrack", "nsenter", "ip")
CNI_PLUGINS = Path("/usr/lib/cni")
CONTAINERD = "/run/containerd/containerd.sock"
PAUSE_IMAGE = "localhost/pause:1"
COMMAND_DEADLINE_S = 300.0

JOIN = 'while [ "$1" != -- ]; do echo $$ > "$1/cgroup.procs"; shift; done; shift; exec "$@"'
"""Moves itself into the groups before ``--``, then runs what follows."""
JOIN_ALL = 'for group in /sys/fs/cgroup/*/; do echo $$ > "$group/cgroup.procs"; done; exec "$@"'
"""The same in a machine, whose groups are all that it sees."""

BOOT = r"""
set -e
name=$1 folder=$2
hostname "$name"
mount -t tmpfs tmpfs /run
mount --bind "$folder/lib" /var/lib
mount --bind "$folder/log" /var/log
mount -t tmpfs tmpfs /sys/fs/cgroup
while IFS=: read -r _ names _; do
    [ -n "$names" ] || continue
    mkdir "/sys/fs/cgroup/${names#name=}"
    case $names in name=*) names=none,$names ;; esac
    mount -t cgroup -o "$names" cgroup "/sys/fs/cgroup/${names#none,name=}"
done < /proc/self/cgroup
# A kubelet sets these for the whole kernel, unless it finds them set. What it finds here are files.
mkdir /run/settings
for setting in vm.overcommit_memory=1 vm.panic_on_oom=0 kernel.panic=10 kernel.panic_on_oops=1 \
    kernel.keys.root_maxkeys=1000000 kernel.keys.root_maxbytes=25000000; do
    key=${setting%=*}
    echo "${setting#*=}" > "/run/settings/$key"
    mount --bind "/run/settings/$key" "/proc/sys/${key//.//}"
done
echo 1 > /proc/sys/net/ipv4/ip_forward
touch "$folder/booted"
while :; do sleep 1000 & wait; done
"""
"""The first process of a machine. It also takes in processes whose parents have ended."""

CONTAINERD_SETTINGS = """
version = 2
[plugins."io.containerd.grpc.v1.cri"]
  sandbox_image = "{pause}"
  # Root in a container may lack CAP_SYS_RESOURCE, and then can't protect a process from the OOM killer.
  restrict_oom_score_adj = true
  [plugins."io.containerd.grpc.v1.cri".cni]
    bin_dir = "{plugins}"
    conf_dir = "{folder}/cni"
"""


class Machine:
    """One machine. It is made without a connection; :func:`testing.cluster.network.connect` makes one."""

    def __init__(self, host: Host, folder: Path, kubeconfig: Path) -> None:
        self.host = host
        self.folder = folder
        self._kubeconfig = kubeconfig
        self._groups: list[Path] = []
        self._first: subprocess.Popen[bytes] | None = None
        self.pid = 0
        """The machine's first process, as this process sees it."""
        self.programs: dict[str, Process] = {}

    def boot(self) -> None:
        """Makes the machine, with nothing in it yet."""
        for name in ("lib", "log", "cni"):
            (self.folder / name).mkdir(parents=True)
        self._groups = cgroups.make(f"twinfang-{self.host.name}")
        command = [find_program("setpriv"), "--pdeathsig", "KILL", "--"]
        command += ["sh", "-c", JOIN, "sh", *map(str, self._groups), "--"]
        command += [
            find_program("unshare"),
            "--net",
            "--mount",
            "--uts",
            "--ipc",
            "--pid",
            "--cgroup",
            "--fork",
        ]
        command += ["--mount-proc", "--kill-child", "--propagation", "private"]
        command += ["bash", "-c", BOOT, "bash", self.host.name, str(self.folder)]
        log = self.folder / "boot.log"
        with log.open("wb") as output:
            self._first = subprocess.Popen(command, stdin=subprocess.DEVNULL, stdout=output, stderr=output)

        def is_up() -> bool:
            assert self._first is not None
            assert self._first.poll() is None, f"{self.host.name} does not boot: {log.read_text()}"
            return (self.folder / "booted").exists()

        wait_until(is_up, f"{self.host.name} boots", TIMEOUT_S)
        children = Path(f"/proc/{self._first.pid}/task/{self._first.pid}/children").read_text()
        self.pid = int(children.split()[0])

    def start_containerd(self) -> None:
        network = {
            "cniVersion": "0.4.0",
            "name": "pods",
            "plugins": [
                {
                    "type": "bridge",
                    "bridge": "pods",
                    "isGateway": True,
                    "hairpinMode": True,  # a pod may reach itself through a Service
                    "ipam": {
                        "type": "host-local",
                        "ranges": [[{"subnet": self.host.pods}]],
                        "routes": [{"dst": "0.0.0.0/0"}],
                    },
                }
            ],
        }
        (self.folder / "cni" / "pods.conflist").write_text(json.dumps(network))
        settings = CONTAINERD_SETTINGS.format(pause=PAUSE_IMAGE, plugins=CNI_PLUGINS, folder=self.folder)
        (self.folder / "containerd.toml").write_text(settings)
        self._start("containerd", "--config", str(self.folder / "containerd.toml"))
        wait_until(lambda: self._answers("ctr", "version"), "containerd answers", TIMEOUT_S)

    def load(self, archive: Path) -> None:
        """Loads an image, so that no registry is asked for it."""
        self.run("ctr", "--namespace", "k8s.io", "images", "import", str(archive))

    def tag(self, image: str, other: str) -> None:
        self.run("ctr", "--namespace", "k8s.io", "images", "tag", image, other)

    def start_node(self) -> None:
        """Starts kubelet and kube-proxy."""
        (self.folder / "resolv.conf").write_text("")
        settings = {
            "apiVersion": "kubelet.config.k8s.io/v1beta1",
            "kind": "KubeletConfiguration",
            "authentication": {"anonymous": {"enabled": True}, "webhook": {"enabled": False}},
            "authorization": {"mode": "AlwaysAllow"},
            "cgroupDriver": "cgroupfs",
            "clusterDNS": [CONTROL_PLANE],
            "clusterDomain": "cluster.local",
            "failSwapOn": False,
            "resolvConf": str(self.folder / "resolv.conf"),
            "volumePluginDir": "/var/lib/kubelet/plugins",
            # The defaults evict pods where the machine's own disk is 85 % full.
            "evictionHard": {"memory.available": "100Mi"},
            "imageGCHighThresholdPercent": 100,
        }
        (self.folder / "kubelet.json").write_text(json.dumps(settings))
        identity = [f"--hostname-override={self.host.name}", f"--kubeconfig={self._kubeconfig}"]
        kubelet = [f"--config={self.folder / 'kubelet.json'}", f"--node-ip={self.host.address}"]
        kubelet += ["--container-runtime=remote", f"--container-runtime-endpoint=unix://{CONTAINERD}"]
        self._start("kubelet", *identity, *kubelet)
        # conntrack's limits are the whole kernel's: zeros leave them alone.
        limits = ["--conntrack-max-per-core=0", "--conntrack-min=0"]
        limits += ["--conntrack-tcp-timeout-established=0", "--conntrack-tcp-timeout-close-wait=0"]
        self._start("kube-proxy", *identity, "--proxy-mode=iptables", f"--cluster-cidr={PODS}", *limits)

    def stop(self) -> None:
        """Ends the machine with everything in it."""
        if self._first is not None:
            self._first.kill()  # its child, the machine's first process, ends with it
            self._first.wait(TIMEOUT_S)
        cgroups.remove(self._groups)
        shutil.rmtree(self.folder / "lib", ignore_errors=True)  # gigabytes of images

    def run(self, *command: str) -> str:
        """Runs a command in the machine and returns its output."""
        ran = subprocess.run(
            self._inside(*command), capture_output=True, text=True, timeout=COMMAND_DEADLINE_S
        )
        assert ran.returncode == 0, f"{self.host.name}: {' '.join(command)}: {ran.stderr}"
        return ran.stdout

    def _answers(self, *command: str) -> bool:
        assert self.programs["containerd"].is_running, self.programs["containerd"].log_tail
        return subprocess.run(self._inside(*command), capture_output=True).returncode == 0

    def _start(self, program: str, *arguments: str) -> None:
        log = self.folder / f"{program}.log"
        self.programs[program] = Process(self._inside(find_program(program), *arguments), log)
        self.programs[program].start()

    def _inside(self, *command: str) -> list[str]:
        enter = [
            find_program("nsenter"),
            f"--target={self.pid}",
            "--net",
            "--mount",
            "--uts",
            "--ipc",
            "--pid",
        ]
        return [*enter, "--cgroup", "--", "sh", "-c", JOIN_ALL, "sh", *command]


def kill_processes_of(pod_uid: str) -> int:
    """Kills all processes of a pod, on whichever machine it is; returns how many there were."""
    killed = 0
    for path in Path("/proc").glob("[0-9]*/cgroup"):
        try:
            if f"/pod{pod_uid}/" in path.read_text():
                os.kill(int(path.parent.name), signal.SIGKILL)
                killed += 1
        except (FileNotFoundError, ProcessLookupError):  # it has ended by itself
            pass
    return killed
