//! How a command can fail, and what the shell is told.

use std::fmt::Display;
use std::io;
use std::process::ExitCode;

/// How a command can fail.
#[derive(Debug)]
pub(crate) enum Failure {
    /// Asked for in a way that cannot be: exit code 2.
    Usage(String),
    /// Anything else that went wrong: exit code 1.
    Run(String),
    /// Ctrl-C: exit code 130, as shells have it for SIGINT.
    Interrupted,
    /// Nobody reads our output any more (`airs … | head`): not an error.
    OutputClosed,
}

impl Failure {
    /// A failure about `place`, which is named unless the error names it.
    pub(crate) fn at(place: &str, error: impl Display) -> Failure {
        let text = error.to_string();
        Failure::Run(if text.contains(place) { text } else { format!("{place}: {text}") })
    }

    /// The same failure, about `place` if it does not name it.
    pub(crate) fn about(self, place: &str) -> Failure {
        match self {
            Failure::Run(text) => Failure::at(place, text),
            other => other,
        }
    }

    /// Says what happened and gives the exit code.
    pub(crate) fn report(self) -> ExitCode {
        let (code, text) = match self {
            Failure::Usage(text) => (2, text),
            Failure::Run(text) => (1, text),
            Failure::Interrupted => return ExitCode::from(130),
            Failure::OutputClosed => return ExitCode::SUCCESS,
        };
        // One line, whatever an error message contains.
        crate::terminal::say(&format!("error: {}", text.split_whitespace().collect::<Vec<_>>().join(" ")));
        ExitCode::from(code)
    }
}

impl Display for Failure {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        match self {
            Failure::Usage(text) | Failure::Run(text) => f.write_str(text),
            Failure::Interrupted => f.write_str("interrupted"),
            Failure::OutputClosed => f.write_str("nobody reads the output"),
        }
    }
}

impl From<engine::Error> for Failure {
    fn from(error: engine::Error) -> Self {
        Failure::Run(error.to_string())
    }
}

impl From<library::Error> for Failure {
    fn from(error: library::Error) -> Self {
        match error {
            library::Error::Cancelled => Failure::Interrupted,
            library::Error::Name { .. } | library::Error::Setting { .. } => Failure::Usage(error.to_string()),
            _ => Failure::Run(error.to_string()),
        }
    }
}

impl Failure {
    /// A failure to write to standard output.
    pub(crate) fn output(error: io::Error) -> Failure {
        match error.kind() {
            io::ErrorKind::BrokenPipe => Failure::OutputClosed,
            _ => Failure::Run(format!("standard output: {error}")),
        }
    }
}
