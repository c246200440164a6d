//! Text that comes in pieces, cut before the first stop string.

/// Lets text through up to the first stop string. What could be the beginning of one is held back until it is clear.
#[derive(Debug, Clone, Default)]
pub struct StopStrings {
    stops: Vec<String>,
    held: String,
}

impl StopStrings {
    /// For these stop strings; empty ones are ignored.
    pub fn new(stops: &[String]) -> StopStrings {
        let stops = stops.iter().filter(|s| !s.is_empty()).cloned().collect();
        StopStrings { stops, held: String::new() }
    }

    /// Takes the next piece; gives the text that is free to go, and whether a stop string has come.
    pub fn push(&mut self, piece: &str) -> (String, bool) {
        self.held.push_str(piece);
        if let Some(at) = self.stops.iter().filter_map(|s| self.held.find(s.as_str())).min() {
            self.held.truncate(at);
            return (std::mem::take(&mut self.held), true);
        }
        let undecided = self.held.char_indices().map(|(at, _)| at).find(|&at| {
            let tail = &self.held[at..];
            self.stops.iter().any(|s| s.starts_with(tail))
        });
        let tail = self.held.split_off(undecided.unwrap_or(self.held.len()));
        (std::mem::replace(&mut self.held, tail), false)
    }

    /// What was held back, when no more comes.
    pub fn finish(&mut self) -> String {
        std::mem::take(&mut self.held)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// All that goes through when `text` comes in pieces of `n` characters, and whether it was stopped.
    fn through(stops: &[&str], text: &str, n: usize) -> (String, bool) {
        let stops: Vec<String> = stops.iter().map(|s| (*s).to_owned()).collect();
        let mut filter = StopStrings::new(&stops);
        let mut out = String::new();
        for piece in text.chars().collect::<Vec<_>>().chunks(n) {
            let (free, stopped) = filter.push(&piece.iter().collect::<String>());
            out.push_str(&free);
            if stopped {
                return (out, true);
            }
        }
        out.push_str(&filter.finish());
        (out, false)
    }

    #[test]
    fn the_pieces_do_not_matter() {
        for n in 1..12 {
            assert_eq!(through(&["END", "STOP"], "one ENSTO two STOP three END", n), ("one ENSTO two ".into(), true));
            assert_eq!(through(&["aab"], "aaaab", n), ("aa".into(), true));
            assert_eq!(through(&["日本"], "は日々日本語", n), ("は日々".into(), true));
            assert_eq!(through(&["END"], "the EN", n), ("the EN".into(), false));
            assert_eq!(through(&["", "x"], "abc", n), ("abc".into(), false));
            assert_eq!(through(&[], "abc", n), ("abc".into(), false));
        }
    }

    #[test]
    fn only_what_could_begin_a_stop_string_is_held_back() {
        let mut filter = StopStrings::new(&["</s>".to_owned()]);
        assert_eq!(filter.push("a < b"), ("a < b".to_owned(), false));
        assert_eq!(filter.push("c </"), ("c ".to_owned(), false));
        assert_eq!(filter.push("s"), (String::new(), false));
        assert_eq!(filter.push("x"), ("</sx".to_owned(), false));
    }
}
