//! airs: runs GGUF language models on machines too small for them.

mod commands;
mod failure;
mod flags;
mod interrupt;
mod kv_files;
mod kv_watch;
mod lanes;
mod machine;
mod metrics;
mod open;
mod planning;
mod prompt;
mod receipts;
mod relief;
mod remote;
mod speculate;
mod storage;
mod terminal;
mod values;
mod warm;

use std::process::ExitCode;

fn main() -> ExitCode {
    let (command, settings) = match flags::read(std::env::args_os()) {
        Ok(read) => read,
        Err(code) => return code,
    };
    interrupt::install();
    match commands::execute(command, &settings) {
        Ok(()) => ExitCode::SUCCESS,
        Err(failure) => failure.report(),
    }
}
