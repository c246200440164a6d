//! Who comes when, with what.
//!
//! A trace is CSV whose first line names the columns, or JSON lines with the same names:
//!
//! ```text
//! at_ms    when it comes, in milliseconds from the beginning
//! prompt   tokens of its prompt
//! gen      tokens that it generates
//! class    interactive (where nothing is said), system, background, batch
//! prefix   tokens of the prompt that it shares with the others of its group (else 0)
//! group    a number (else 0)
//! ```

use std::path::Path;
use std::time::Duration;

use engine::Class;
use serde_json::{Map, Value};

use super::Random;
use crate::failure::Failure;
use crate::flags::Bench;

/// When a session comes.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum When {
    /// So long after the beginning.
    At(Duration),
    /// When the session before it has its first token.
    AfterFirstToken,
}

/// A session to come.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(super) struct Arrival {
    pub when: When,
    pub class: Class,
    pub prompt: usize,
    pub generate: usize,
    prefix: usize,
    group: u64,
}

/// Sessions in the order in which they come.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(super) struct Trace(pub Vec<Arrival>);

impl Trace {
    /// What the flags ask for; `None` if that is not about sessions.
    pub(super) fn of(args: &Bench) -> Result<Option<Trace>, Failure> {
        if let Some(path) = &args.arrivals {
            return Trace::read(path).map(Some);
        }
        let Some(sessions) = args.sessions else { return Ok(None) };
        let prompt = args.shared_prefix + args.unique;
        if prompt == 0 {
            return Err(Failure::Usage("--shared-prefix and --unique are both 0: there is no prompt".to_owned()));
        }
        let arrival = |i: usize| Arrival {
            when: if i == 0 || args.shared_prefix == 0 { When::At(Duration::ZERO) } else { When::AfterFirstToken },
            class: Class::Interactive,
            prompt,
            generate: args.generate_each,
            prefix: args.shared_prefix,
            group: 0,
        };
        Ok(Some(Trace((0..sessions).map(arrival).collect())))
    }

    fn read(path: &Path) -> Result<Trace, Failure> {
        let place = path.display().to_string();
        let text = std::fs::read_to_string(path).map_err(|e| Failure::at(&place, e))?;
        parse(&text).map_err(|text| Failure::Usage(format!("--arrivals {place}: {text}")))
    }

    /// Positions of the longest session.
    pub(super) fn context(&self) -> usize {
        self.0.iter().map(|a| a.prompt + a.generate).max().unwrap_or(1)
    }
}

impl Arrival {
    /// The tokens of its prompt, as the `index`th session: what it shares with its group, then what no one else has.
    pub(super) fn tokens(&self, index: usize, vocab_len: usize) -> Vec<u32> {
        let mut shared = Random(0x9e37_79b9 ^ (self.group + 1) << 32);
        let mut own = Random(index as u64 + 1);
        let prefix = self.prefix.min(self.prompt);
        let mut tokens: Vec<u32> = (0..prefix).map(|_| shared.token(vocab_len)).collect();
        // The first numbers of generators whose seeds are near are near, too.
        for _ in 0..8 {
            own.token(vocab_len);
        }
        tokens.extend((prefix..self.prompt).map(|_| own.token(vocab_len)));
        tokens
    }
}

fn parse(text: &str) -> Result<Trace, String> {
    let is_json = text.trim_start().starts_with('{');
    let lines = text.lines().enumerate().filter(|(_, line)| !line.trim().is_empty());
    let mut columns: Option<Vec<String>> = None;
    let mut arrivals = Vec::new();
    for (number, line) in lines {
        let at = |text: String| format!("line {}: {text}", number + 1);
        let row: Map<String, Value> = if is_json {
            serde_json::from_str(line).map_err(|e| at(e.to_string()))?
        } else {
            let cells = line.split(',').map(|cell| cell.trim().to_owned());
            let Some(columns) = &columns else {
                columns = Some(cells.collect());
                continue;
            };
            columns.iter().cloned().zip(cells.map(Value::String)).collect()
        };
        arrivals.push(arrival(&row).map_err(at)?);
    }
    if arrivals.is_empty() {
        return Err("there are no sessions in it".to_owned());
    }
    arrivals.sort_by_key(|a: &Arrival| match a.when {
        When::At(at) => at,
        When::AfterFirstToken => Duration::ZERO,
    });
    Ok(Trace(arrivals))
}

const COLUMNS: [&str; 6] = ["at_ms", "prompt", "gen", "class", "prefix", "group"];

fn arrival(row: &Map<String, Value>) -> Result<Arrival, String> {
    if let Some(unknown) = row.keys().find(|key| !COLUMNS.contains(&key.as_str())) {
        return Err(format!("{unknown:?} is no column; there are {}", COLUMNS.join(", ")));
    }
    let number = |key: &str| match row.get(key) {
        None => Ok(None),
        Some(Value::String(text)) if text.is_empty() => Ok(None),
        Some(Value::String(text)) => text.parse().map(Some).map_err(|_| format!("{key} is {text:?}, no whole number")),
        Some(value) => value.as_u64().map(Some).ok_or_else(|| format!("{key} is {value}, no whole number")),
    };
    let at_least_one = |key: &str| match number(key)? {
        Some(n) if n > 0 => usize::try_from(n).map_err(|e| format!("{key}: {e}")),
        _ => Err(format!("{key} must be at least 1")),
    };
    let class = match row.get("class").and_then(Value::as_str) {
        None | Some("") => Class::Interactive,
        Some(name) => Class::ALL.into_iter().find(|c| c.name() == name).ok_or_else(|| format!("class is {name:?}"))?,
    };
    Ok(Arrival {
        when: When::At(Duration::from_millis(number("at_ms")?.ok_or("at_ms is missing")?)),
        class,
        prompt: at_least_one("prompt")?,
        generate: at_least_one("gen")?,
        prefix: number("prefix")?.unwrap_or(0) as usize,
        group: number("group")?.unwrap_or(0),
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn csv_and_json_lines_say_the_same() {
        let csv = "at_ms,prompt,gen,class,prefix,group\n50, 10, 3, background, 4, 7\n0,20,5,,,\n";
        let json = r#"{"at_ms": 50, "prompt": 10, "gen": 3, "class": "background", "prefix": 4, "group": 7}

            {"at_ms": 0, "prompt": 20, "gen": 5}"#;
        let trace = parse(csv).unwrap();
        assert_eq!(trace, parse(json).unwrap());
        assert_eq!(trace.0.len(), 2);
        let Arrival { when, class, prompt, generate, prefix, group } = trace.0[1].clone();
        assert_eq!((when, class), (When::At(Duration::from_millis(50)), Class::Background));
        assert_eq!((prompt, generate, prefix, group), (10, 3, 4, 7));
        assert_eq!((trace.0[0].prompt, trace.0[0].class), (20, Class::Interactive), "in the order of time");
        assert_eq!(trace.context(), 25);
    }

    #[test]
    fn what_is_wrong_is_said_with_its_line() {
        for (text, words) in [
            ("", "no sessions"),
            ("at_ms,prompt,gen\n", "no sessions"),
            ("at_ms,prompt,gen\n1,2,3\n1,0,3", "line 3: prompt"),
            ("at_ms,prompt\n1,2", "line 2: gen"),
            ("prompt,gen\n1,2", "line 2: at_ms"),
            ("at_ms,prompt,gen,class\n1,2,3,vip", "vip"),
            ("at_ms,prompt,gen,colour\n1,2,3,red", "colour"),
            ("at_ms,prompt,gen\n-1,2,3", "-1"),
            ("{\"at_ms\": 1}\n{", "line 1: prompt"),
        ] {
            let error = parse(text).unwrap_err();
            assert!(error.contains(words), "{text:?}: {error}");
        }
    }

    #[test]
    fn sessions_of_a_group_share_their_prefix_and_nothing_else() {
        let session = |group, index| {
            let csv = format!("at_ms,prompt,gen,prefix,group\n0,40,1,30,{group}");
            parse(&csv).unwrap().0[0].tokens(index, 50_000)
        };
        let (a, b, other) = (session(1, 0), session(1, 1), session(2, 0));
        assert_eq!((a.len(), &a[..30]), (40, &b[..30]));
        assert!(a[30..].iter().zip(&b[30..]).all(|(a, b)| a != b));
        assert!(a[..30].iter().zip(&other[..30]).all(|(a, b)| a != b));
    }
}
