"""Build Kubernetes from the source package of Debian 12, once, into a cache outside the project.

Debian ships Kubernetes 1.20.2 complete as source and only kubectl as a binary. The build takes about four CPU minutes, 2 GB
of memory and 2 GB of disk (freed afterwards); the static program that remains takes 100 MB. Packages: golang-go, dpkg-dev.
"""

from __future__ import annotations

import fcntl
import os
import re
import shutil
import subprocess
import sys
import time
from pathlib import Path

VERSION = "1.20.2"
PROGRAMS = ("kube-apiserver", "kube-controller-manager", "kube-scheduler", "kubelet")
SOURCES_LIST = Path("/etc/apt/sources.list.d/debian.sources")
PACKAGE = "k8s.io/kubernetes"
REVISION = 4
"""Of what is built here: a cache of another one is not used."""


def cache() -> Path:
    """Where the programs are kept between runs."""
    root = os.environ.get("XDG_CACHE_HOME") or str(Path.home() / ".cache")
    return Path(root) / "trireme" / f"kubernetes-{VERSION}-{REVISION}"


def built() -> bool:
    return all((cache() / program).exists() for program in PROGRAMS)


def obstacle() -> str | None:
    """Why the programs are neither here nor can be built here; None when they are or can be."""
    if built():
        return None
    missing = [tool for tool in ("go", "apt-get", "dpkg-source") if not shutil.which(tool)]
    if missing:
        return f"Kubernetes {VERSION} is not built and {', '.join(missing)} is missing: apt-get install golang-go dpkg-dev"
    if not SOURCES_LIST.exists() or "bookworm" not in SOURCES_LIST.read_text():
        return f"Kubernetes {VERSION} is built from the source package of Debian 12 (bookworm), which {SOURCES_LIST} does not name"
    return None


def build() -> Path:
    """The folder of the four programs; built first if they are not there. One build at a time on a machine."""
    target = cache()
    target.parent.mkdir(parents=True, exist_ok=True)
    with open(target.parent / "build.lock", "w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        if not built():
            work = target.with_name(target.name + ".work")
            for part in ("apt", "gopath"):  # of a build that was killed; what it had compiled is still good
                shutil.rmtree(work / part, ignore_errors=True)
            target.mkdir(exist_ok=True)
            _compile(_prepare(_mend(_fetch(work)), work), work, target)
            shutil.rmtree(work)
    return target


def _say(message: str) -> None:
    print(f"build of Kubernetes {VERSION}: {message}", file=sys.stderr, flush=True)


def _fetch(work: Path) -> Path:
    """Unpack the source package where GOPATH mode wants it. apt's lists are our own, so the system's settings stay as they are."""
    source = work / "gopath" / "src" / PACKAGE
    for folder in ("lists/partial", "parts", "source"):
        (work / "apt" / folder).mkdir(parents=True, exist_ok=True)
    text = re.sub(r"(?m)^Types:.*$", "Types: deb-src", SOURCES_LIST.read_text())
    (work / "apt/parts/debian.sources").write_text(text)
    apt = [
        "apt-get",
        "-qq",
        "-o",
        "Dir::Etc::sourcelist=/dev/null",
        "-o",
        f"Dir::Etc::sourceparts={work}/apt/parts",
        "-o",
        f"Dir::State::lists={work}/apt/lists",
        "-o",
        "APT::Sandbox::User=root",
    ]
    subprocess.run([*apt, "update"], check=True)
    subprocess.run([*apt, "source", "kubernetes"], check=True, cwd=work / "apt/source", stdout=subprocess.DEVNULL)
    source.parent.mkdir(parents=True, exist_ok=True)
    next((work / "apt/source").glob("kubernetes-*/")).rename(source)
    _say("sources unpacked")
    return source


def _mend(source: Path) -> Path:
    """Since Go 1.18, iterators of maps are allocated by the caller; a vendored package that does not know crashes the API server.

    It comes to light with custom resources. Debian 12 has Go 1.19 and a source package made for 1.15.
    """
    folder = source / "vendor/github.com/modern-go/reflect2"
    pointers, rest = (
        "t, h, buckets, bptr, overflow, oldoverflow unsafe.Pointer",
        "startBucket uintptr; small [4]uint8; bucket, checkBucket uintptr",
    )
    call = "mapiterinit(type2.rtype, *(*unsafe.Pointer)(obj)"
    changes = [
        ("unsafe_link.go", "m unsafe.Pointer) *hiter", "m unsafe.Pointer, it *hiter)"),
        ("unsafe_link.go", "// rest fields are ignored", f"{pointers}; {rest} // as in runtime.hiter"),
        ("unsafe_map.go", f"{call}),", f"func() *hiter {{ it := new(hiter); {call}, it); return it }}(),"),
    ]
    for name, old, new in changes:
        text = (folder / name).read_text()
        assert old in text or new in text, f"{name} is not as Kubernetes {VERSION} has it"
        (folder / name).write_text(text.replace(old, new))
    return source


def _environment(work: Path) -> dict[str, str]:
    """GOPATH mode, as in Debian's own rules: in module mode a Go newer than 1.15 finds the vendor folder inconsistent."""
    go = {"GOPATH": str(work / "gopath"), "GOCACHE": str(work / "gocache"), "GO111MODULE": "off", "GOPROXY": "off", "CGO_ENABLED": "0"}
    hurry = {"GOFLAGS": f"-p={os.cpu_count() or 2}", "GOGC": "800"}  # garbage collection is a fifth of a compiler's work
    return {**hurry, **os.environ, **go}


def _prepare(source: Path, work: Path) -> Path:
    """Make the one generated file that the source package lacks: the OpenAPI definitions of all types marked for it."""
    generator = work / "openapi-gen"
    vendored = "./vendor/k8s.io/kube-openapi/cmd/openapi-gen"
    subprocess.run(["go", "build", "-o", generator, vendored], check=True, cwd=source, env=_environment(work))
    staging = sorted(p.name for p in (source / "staging/src/k8s.io").iterdir() if p.name not in ("code-generator", "sample-apiserver"))
    roots = ["cmd", "pkg", "plugin", *(f"vendor/k8s.io/{name}" for name in staging)]
    marked = {file.parent for root in roots for file in (source / root).rglob("*.go") if b"+k8s:openapi-gen=" in file.read_bytes()}
    inputs = ",".join(sorted(f"{PACKAGE}/{folder.relative_to(source)}" for folder in marked))
    command = [
        generator,
        "--logtostderr",
        "-i",
        inputs,
        "-p",
        f"{PACKAGE}/pkg/generated/openapi",
        "-O",
        "zz_generated.openapi",
        "-h",
        "hack/boilerplate/boilerplate.generatego.txt",
        "-r",
        work / "openapi.violations",
    ]
    subprocess.run(command, check=True, cwd=source, env=_environment(work))
    _say("OpenAPI definitions generated")
    return source


def _compile(source: Path, work: Path, target: Path) -> None:
    """Build one program that is all four, by the name that it is called by: they share nine tenths of their packages, and linking takes
    longer than a megabyte takes to read. Clouds and Docker are left out, and nothing is optimised: tests ask little of the servers. The
    version is linked in (under the vendored path), or the server would call itself v0.0.0-master."""
    began = time.monotonic()
    folder = source / "cmd" / "trireme-all"
    folder.mkdir(exist_ok=True)
    (folder / "main.go").write_text(MAIN)
    major, minor, _ = VERSION.split(".")
    values = {"gitVersion": f"v{VERSION}", "gitMajor": major, "gitMinor": minor, "gitTreeState": "clean"}
    places = [f"{PACKAGE}/vendor/k8s.io/{package}" for package in ("component-base/version", "client-go/pkg/version")]
    flags = "-s -w " + " ".join(f"-X {place}.{name}={value}" for place in places for name, value in values.items())
    command = ["go", "build", "-tags", "providerless,dockerless", "-gcflags=all=-N -l -dwarf=false", "-ldflags", flags]
    partial = target / f"{PROGRAMS[0]}.partial"
    subprocess.run([*command, "-o", partial, f"./cmd/{folder.name}"], check=True, cwd=source, env=_environment(work))
    for program in PROGRAMS[1:]:
        (target / program).unlink(missing_ok=True)
        (target / program).symlink_to(PROGRAMS[0])
    partial.rename(target / PROGRAMS[0])
    _say(f"built in {time.monotonic() - began:.0f} s")


MAIN = """// One program for all parts of Kubernetes that tests start: which one it is, its name says.
package main

import (
	"fmt"
	"os"
	"path/filepath"

	"github.com/spf13/cobra"
	_ "k8s.io/component-base/metrics/prometheus/clientgo"
	_ "k8s.io/component-base/metrics/prometheus/restclient"
	_ "k8s.io/component-base/metrics/prometheus/version"
	apiserver "k8s.io/kubernetes/cmd/kube-apiserver/app"
	manager "k8s.io/kubernetes/cmd/kube-controller-manager/app"
	scheduler "k8s.io/kubernetes/cmd/kube-scheduler/app"
	kubelet "k8s.io/kubernetes/cmd/kubelet/app"
)

func main() {
	programs := map[string]func() *cobra.Command{
		"kube-apiserver":          apiserver.NewAPIServerCommand,
		"kube-controller-manager": manager.NewControllerManagerCommand,
		"kube-scheduler":          func() *cobra.Command { return scheduler.NewSchedulerCommand() },
		"kubelet":                 kubelet.NewKubeletCommand,
	}
	program, known := programs[filepath.Base(os.Args[0])]
	if !known {
		fmt.Fprintln(os.Stderr, os.Args[0], "is not a program of Kubernetes")
		os.Exit(2)
	}
	if program().Execute() != nil {
		os.Exit(1)
	}
}
"""

if __name__ == "__main__":
    print(build())
