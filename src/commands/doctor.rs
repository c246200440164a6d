//! `airs doctor`: what this machine offers, what each thing is good for, and the command that would enable it.

use std::fs::File;
use std::path::Path;

use memory::backing::{self, Backing, Support};
use memory::damon::State;
use memory::pressure::Reader;
use model::Isa;
use residency::headroom;
use serde_json::{Value, json};

use crate::failure::Failure;
use crate::flags::{Doctor, Settings};
use crate::machine;
use crate::receipts;
use crate::storage;
use crate::terminal::{print, print_json, size};

/// One thing that a machine may offer.
struct Capability {
    name: &'static str,
    /// `None`: could not be found out.
    available: Option<bool>,
    /// What was found.
    found: String,
    /// What it is good for.
    gives: &'static str,
    /// The command that would enable it, where it is missing and one would.
    enable: Option<String>,
}

impl Capability {
    fn new(name: &'static str, available: impl Into<Option<bool>>, found: String, gives: &'static str) -> Capability {
        Capability { name, available: available.into(), found, gives, enable: None }
    }

    /// With the command that enables it.
    fn or_run(mut self, command: &str) -> Capability {
        self.enable = (self.available == Some(false)).then(|| command.to_owned());
        self
    }
}

pub(crate) fn execute(args: &Doctor, settings: &Settings) -> Result<(), Failure> {
    let reader = Reader::default();
    let mut all = pages(&reader);
    all.extend(kernel_interfaces(&reader));
    all.extend(limits(&reader));
    all.extend(instruction_sets());
    all.extend(rates(settings));
    if args.output.json() {
        let one = |c: &Capability| json!({"name": c.name, "available": c.available, "found": c.found, "gives": c.gives, "enable": c.enable});
        return print_json(&json!({ "capabilities": all.iter().map(one).collect::<Vec<Value>>() }));
    }
    let mut out = String::new();
    for c in &all {
        let mark = match c.available {
            Some(true) => "yes",
            Some(false) => "no",
            None => "?",
        };
        out += &format!("{:<4}{:<24}{}\n{:28}gives: {}\n", mark, c.name, c.found, "", c.gives);
        if let Some(command) = &c.enable {
            out += &format!("{:28}enable: {command}\n", "");
        }
    }
    print(&out)
}

/// The size of model that memory is looked for: the smallest that is worth pinning.
const MODEL_BYTES: usize = 128 << 20;

/// Kinds of pages, and whether they can be kept: as loading a model would find them.
fn pages(reader: &Reader) -> Vec<Capability> {
    let known = |backing| match backing {
        Backing::Huge => Some(("hugetlb pool", "weights in huge pages that nothing can swap")),
        Backing::Thp => Some(("transparent huge pages", "weights in huge pages: fewer TLB misses in decoding")),
        Backing::Base => Some(("mlock limit", "weights that are never swapped or compressed")),
        // Every machine has it.
        Backing::Unpinned => None,
    };
    let one = |found: Support| {
        let (name, gives) = known(found.backing)?;
        let told = format!("for a model of {}: {}", size(MODEL_BYTES as u64), found.reason);
        let capability = Capability::new(name, found.available, told, gives);
        Some(found.fix.iter().fold(capability, |capability, fix| capability.or_run(fix)))
    };
    let mut all: Vec<Capability> = backing::probe(MODEL_BYTES).into_iter().filter_map(one).collect();
    let swap = reader.meminfo().map_or(0, |i| i.swap_bytes);
    let found = if swap == 0 { "none".to_owned() } else { size(swap) };
    all.push(
        Capability::new("no swap", swap == 0, found, "memory that stays without being locked")
            .or_run("sudo swapoff -a"),
    );
    all
}

/// Interfaces of the kernel that may be switched off.
fn kernel_interfaces(reader: &Reader) -> Vec<Capability> {
    let number = |path: &str| reader.text(path).and_then(|t| t.trim().parse::<i64>().ok());
    let device = File::options().read(true).write(true).open("/dev/userfaultfd").is_ok();
    let sysctl = number("/proc/sys/vm/unprivileged_userfaultfd");
    let found = match (device, sysctl) {
        (true, _) => "/dev/userfaultfd can be opened".to_owned(),
        (false, Some(1)) => "for everybody".to_owned(),
        (false, Some(_)) => "for faults of user mode only (vm.unprivileged_userfaultfd=0)".to_owned(),
        (false, None) => "this kernel has none".to_owned(),
    };
    let uffd = Capability::new(
        "userfaultfd",
        device || sysctl == Some(1),
        found,
        "a weight that is used before it is read is fetched; without it such a use is an error",
    )
    .or_run("sudo setfacl -m u:$USER:rw /dev/userfaultfd, or sudo sysctl vm.unprivileged_userfaultfd=1");
    let disabled = number("/proc/sys/kernel/io_uring_disabled");
    let found = match disabled {
        Some(0) => "for everybody".to_owned(),
        Some(1) => "for privileged processes (kernel.io_uring_disabled=1)".to_owned(),
        Some(_) => "switched off (kernel.io_uring_disabled=2)".to_owned(),
        None => "this kernel does not tell".to_owned(),
    };
    let uring = Capability::new("io_uring", disabled.map(|d| d == 0), found, "deep queues of reads without threads")
        .or_run("sudo sysctl kernel.io_uring_disabled=0");
    let psi = reader.psi();
    let found = psi.map_or("this kernel does not tell".to_owned(), |p| {
        format!("some {:.2} %, full {:.2} % of the last 10 s", p.some.avg10, p.full.avg10)
    });
    let psi = Capability::new(
        "PSI",
        psi.is_some(),
        found,
        "memory is given back before the machine swaps; without it our own major faults are the signal",
    )
    .or_run("add psi=1 to the kernel command line");
    let state = State::read(Path::new("/"));
    let found = match state {
        State::Free => "free".to_owned(),
        State::InUse(n) => format!("in use by somebody else ({n} kdamonds): it will be left alone"),
        State::Absent => "this kernel has none, or does not show it to this user".to_owned(),
    };
    let damon = Capability::new(
        "DAMON",
        state == State::Free,
        found,
        "an outside view of which keys and values are used; optional",
    );
    vec![uffd, uring, psi, damon]
}

/// What bounds the process.
fn limits(reader: &Reader) -> Vec<Capability> {
    let groups = reader.groups();
    let limited: Vec<String> = groups
        .iter()
        .filter_map(|g| Some(format!("v{}: {} of {} used", g.version, size(g.used_bytes), size(g.limit_bytes?))))
        .collect();
    let found = match (groups.is_empty(), limited.is_empty()) {
        (true, _) => "no control group accounts for memory".to_owned(),
        (false, true) => format!("{} groups, none with a limit", groups.len()),
        (false, false) => limited.join("; "),
    };
    let cgroup = Capability::new(
        "control group",
        !groups.is_empty(),
        found,
        "the budget follows the limit; a process beyond it would be killed",
    );
    let host = machine::host();
    let found = host.as_ref().map_or("the kernel does not tell".to_owned(), |host| {
        let b = headroom::budget(host);
        format!(
            "{} of {}: {} can be had, {} stay with the host; idle models may hold {}",
            size(b.bytes),
            size(host.total_bytes),
            size(b.headroom_bytes),
            size(b.reserve_bytes),
            size(b.pool_bytes)
        )
    });
    let budget = Capability::new("memory budget", host.is_some(), found, "what --memory auto takes");
    let threads = machine::threads_default();
    let found = format!("{threads} threads: affinity and CPU quota count");
    vec![cgroup, budget, Capability::new("processors", true, found, "what -t is by default")]
}

fn instruction_sets() -> Vec<Capability> {
    // The plain definition is always there, and an offer to nobody.
    let sets = Isa::ALL.iter().copied().filter(|&isa| isa != Isa::Scalar);
    let best = Isa::detect();
    let one = |isa: Isa| {
        let found = if isa == best { "in use" } else { "" };
        Capability::new(isa.name(), isa.available(), found.to_owned(), "fast products; the results are the same bits")
    };
    sets.map(one).collect()
}

/// What was measured.
fn rates(settings: &Settings) -> Vec<Capability> {
    let threads = machine::threads_default();
    let isa = settings.isa.unwrap_or_else(Isa::detect);
    let rates = receipts::rates(settings, threads, isa).ok();
    let found = rates.map_or("could not be measured".to_owned(), |r| {
        format!("{:.1} GB/s with {threads} threads", r.read_bytes_per_second / 1e9)
    });
    let read = Capability::new("memory bandwidth", rates.map(|_| true), found, "decoding: bytes of weights a token");
    let found = rates.map_or("could not be measured".to_owned(), |r| {
        format!("{:.0} G/s with {threads} threads", r.int8_macs_per_second / 1e9)
    });
    let macs = Capability::new("8-bit multiply-adds", rates.map(|_| true), found, "prompts");
    let home = &settings.library.home;
    let probe = storage::probe_dir(home);
    let (direct, found) = match &probe {
        Ok(p) => {
            let way =
                if p.direct { "past the page cache" } else { "through the page cache: this may be the rate of memory" };
            (Some(p.direct), format!("{:.2} GB/s, {} {way}", p.bytes_per_second / 1e9, size(p.bytes)))
        }
        Err(e) => (None, format!("{}: {e}", home.display())),
    };
    let supported = match direct {
        Some(true) => "the store's file system takes it",
        Some(false) => "the store's file system refuses it",
        None => "could not be tried",
    };
    let o_direct =
        Capability::new("O_DIRECT", direct, supported.to_owned(), "models are read without filling the page cache")
            .or_run("set AIRS_HOME to a directory on a local disk");
    let storage = Capability::new("storage", probe.as_ref().ok().map(|_| true), found, "time to the first token");
    vec![read, macs, o_direct, storage]
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn only_what_is_missing_has_a_command() {
        let command = |available: Option<bool>| Capability::new("x", available, String::new(), "").or_run("do").enable;
        assert_eq!((command(Some(true)), command(None)), (None, None));
        assert_eq!(command(Some(false)).as_deref(), Some("do"));
    }
}
