//! Time to the first token from a cold page cache, beside what bounds it: the time to read the file, and the time to
//! compute the prompt with all weights in memory. Times of the cold start count from its beginning: header parsed, tokenizer
//! made (weights are being read meanwhile), first token there. `over` is the peak of resident memory and page cache beyond
//! weights and KV cache.
//!
//! ```text
//! cargo run --release -p model --example cold_start -- MODEL.gguf [TOKENS [RUNS [UNIT_KIB [WINDOW]]]]
//! ```

use memory::Buffer;
use memory::source::{ByteSource, FileSource, ReadOptions, ReadRoom};
use model::{Error, Header, LoadOptions, Model, Row, Runner, RunnerOptions, Window};
use std::path::Path;
use std::sync::Arc;
use std::time::Instant;

fn main() -> Result<(), Box<dyn std::error::Error>> {
    let args: Vec<String> = std::env::args().skip(1).collect();
    let path = Path::new(args.first().ok_or("which model?")?);
    let number = |i: usize, default| args.get(i).map_or(Ok(default), |a| a.parse());
    let (tokens, runs) = (number(1, 256)?, number(2, 5)?);
    let window = match args.get(4).map(String::as_str) {
        None => LoadOptions::default().window,
        Some("all") => Window::All,
        Some(stages) => Window::Stages(stages.parse()?),
    };
    let unit_bytes = number(3, LoadOptions::default().unit_bytes >> 10)? << 10;
    let options = LoadOptions { unit_bytes, window, ..Default::default() };
    println!(
        "read ms, prefill ms, header ms, tokenizer ms, first token ms, bound ms, ratio, waited ms, MB read, over MiB"
    );
    for _ in 0..runs {
        forget(path)?;
        let read = read_all(path)?;
        let resident = Arc::new(Model::load(path, &mut |_, _| ())?);
        first_token(&resident, tokens)?;
        let begin = Instant::now();
        first_token(&resident, tokens)?;
        let prefill = begin.elapsed().as_secs_f64() * 1e3;
        let needed_bytes = 2 * resident.weights_bytes as usize;
        drop(resident);

        forget(path)?;
        touch(needed_bytes)?;
        let cache_before = cached_kib(path);
        std::fs::write("/proc/self/clear_refs", "5")?;
        let base = status_kib("VmRSS:");
        let begin = Instant::now();
        let elapsed_ms = || begin.elapsed().as_secs_f64() * 1e3;
        let header = Header::open(path, ReadOptions { direct: options.direct_io })?;
        let header_ms = elapsed_ms();
        let model = Arc::new(Model::from_header(header, &options)?);
        let tokenizer_ms = elapsed_ms();
        let kv_bytes = first_token(&model, tokens)?;
        let cold = elapsed_ms();
        let stats = model.stats();
        let peak = status_kib("VmHWM:") - base + cached_kib(path) - cache_before;
        let over = peak / 1024.0 - (model.weights_bytes + kv_bytes) as f64 / (1 << 20) as f64;
        let bound = read.max(prefill);
        println!(
            "{read:.0} {prefill:.0} {header_ms:.0} {tokenizer_ms:.0} {cold:.0} {:.0} {:.2} {:.0} {:.0} {over:.0} ({} of {} waits, {:?})",
            1.15 * bound + 100.0,
            cold / bound,
            stats.waited.as_secs_f64() * 1e3,
            stats.read_bytes as f64 / 1e6,
            stats.faults,
            stats.waits,
            model.backing(),
        );
    }
    Ok(())
}

/// Reads the file once, as the pager does; gives the time in ms.
fn read_all(path: &Path) -> Result<f64, memory::Error> {
    let source = FileSource::open(path, ReadOptions::default())?;
    let len = source.len_bytes();
    const PIECE: u64 = 4 << 20;
    let begin = Instant::now();
    std::thread::scope(|scope| {
        for thread in 0..2 {
            let source = &source;
            scope.spawn(move || {
                let mut room = ReadRoom::new(true);
                for at in (thread * PIECE..len).step_by(2 * PIECE as usize) {
                    source
                        .read(std::slice::from_ref(&(at..(at + PIECE).min(len))), &mut room)
                        .expect("a file that can be read");
                }
            });
        }
    });
    Ok(begin.elapsed().as_secs_f64() * 1e3)
}

/// Computes a prompt; gives the bytes of its KV cache.
fn first_token(model: &Arc<Model>, tokens: usize) -> Result<u64, Error> {
    let threads = std::thread::available_parallelism().map_or(1, usize::from);
    let mut runner = Runner::new(Arc::clone(model), &RunnerOptions { threads, ..Default::default() })?;
    let sequence = runner.sequence_open(tokens);
    let token = |i: usize| ((i * 7919 + 13) % model.config.vocab_len) as u32;
    let rows: Vec<Row> = (0..tokens).map(|i| Row { sequence, token: token(i), logits: i + 1 == tokens }).collect();
    runner.forward(&rows)?;
    Ok(runner.kv_bytes())
}

/// Drops the file from the page cache.
fn forget(path: &Path) -> std::io::Result<()> {
    let file = std::fs::File::open(path)?;
    file.sync_all()?;
    std::process::Command::new("dd")
        .arg(format!("if={}", path.display()))
        .args(["iflag=nocache", "count=0", "status=none"])
        .status()
        .map(drop)
}

/// Takes memory and gives it back: a virtual machine's host may have taken away what was free, and brings each page back at a
/// tenth of the speed of clearing it, which is not the subject here.
fn touch(len_bytes: usize) -> Result<(), memory::Error> {
    Buffer::new(len_bytes)?.chunks_mut(4096).for_each(|page| page[0] = 1);
    Ok(())
}

/// KiB of the file in the page cache, by `fincore`.
fn cached_kib(path: &Path) -> f64 {
    let output = std::process::Command::new("fincore").args(["-b", "-n", "-o", "RES"]).arg(path).output();
    let text = output.map(|o| String::from_utf8_lossy(&o.stdout).into_owned()).unwrap_or_default();
    text.trim().parse::<f64>().unwrap_or(0.0) / 1024.0
}

fn status_kib(field: &str) -> f64 {
    let status = std::fs::read_to_string("/proc/self/status").unwrap_or_default();
    let line = status.lines().find_map(|line| line.strip_prefix(field)).unwrap_or_default();
    line.split_whitespace().next().and_then(|n| n.parse().ok()).unwrap_or(0.0)
}
