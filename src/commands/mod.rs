//! One file for each verb.

mod bench;
mod chat;
mod doctor;
mod list;
mod logits;
mod mem;
mod perplexity;
mod plan;
mod pull;
mod replay;
mod rm;
mod run;
mod show;
mod tokenize;
mod why;

use crate::failure::Failure;
use crate::flags::{Command, Settings};

/// Does what `command` says.
pub(crate) fn execute(command: Command, settings: &Settings) -> Result<(), Failure> {
    match command {
        Command::Run(args) => run::execute(&args, settings),
        Command::Pull(args) => pull::execute(&args, settings),
        Command::List(args) => list::execute(&args, settings),
        Command::Rm(args) => rm::execute(&args, settings),
        Command::Show(args) => show::execute(&args, settings),
        Command::Plan(args) => plan::execute(&args, settings),
        Command::Mem(args) => mem::execute(&args, settings),
        Command::Doctor(args) => doctor::execute(&args, settings),
        Command::Tokenize(args) => tokenize::execute(&args, settings),
        Command::Logits(args) => logits::execute(&args, settings),
        Command::Perplexity(args) => perplexity::execute(&args, settings),
        Command::Why(args) => why::execute(&args),
        Command::Bench(args) => bench::execute(&args, settings),
    }
}
