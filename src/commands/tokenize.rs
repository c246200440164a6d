//! `airs tokenize`: text on standard input, token ids out.

use std::io::{self, Read};

use model::{Header, Tokenizer};

use crate::failure::Failure;
use crate::flags::{Settings, Tokenize};
use crate::open::locate;
use crate::terminal::{print, print_json};

pub(crate) fn execute(args: &Tokenize, settings: &Settings) -> Result<(), Failure> {
    let path = locate(settings, args.model.name())?;
    let place = path.display().to_string();
    let header = Header::read(&path).map_err(|e| Failure::at(&place, e))?;
    let tokenizer = Tokenizer::new(&header.gguf.metadata).map_err(|e| Failure::at(&place, e))?;
    let mut bytes = Vec::new();
    io::stdin().lock().read_to_end(&mut bytes).map_err(|e| Failure::Run(format!("standard input: {e}")))?;
    let text = String::from_utf8(bytes)
        .map_err(|e| Failure::Run(format!("standard input: no UTF-8 at byte {}", e.utf8_error().valid_up_to())))?;
    let ids = tokenizer.encode(&text, args.special);
    if args.output.json() {
        return print_json(&ids.into());
    }
    let line = |&id: &u32| format!("{id:>7}  {:?}\n", String::from_utf8_lossy(&tokenizer.token_bytes(id, true)));
    print(&ids.iter().map(line).collect::<String>())
}
