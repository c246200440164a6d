//! Many texts in one allocation: a vocabulary has hundreds of thousands, and the first answer waits for them.

use std::fmt;

/// A list of texts.
#[derive(Clone, Default, PartialEq, Eq)]
pub struct Texts {
    /// All of them, one behind the other.
    all: String,
    /// Where each ends in `all`, in bytes.
    ends: Vec<usize>,
}

impl Texts {
    /// Number of texts.
    pub fn len(&self) -> usize {
        self.ends.len()
    }

    /// Whether there are none.
    pub fn is_empty(&self) -> bool {
        self.ends.is_empty()
    }

    /// Text `index`, from 0.
    pub fn get(&self, index: usize) -> Option<&str> {
        let end = *self.ends.get(index)?;
        let start = index.checked_sub(1).map_or(0, |before| self.ends[before]);
        Some(&self.all[start..end])
    }

    /// All texts in order.
    pub fn iter(&self) -> impl Iterator<Item = &str> {
        (0..self.len()).filter_map(|index| self.get(index))
    }

    /// Appends a text.
    pub fn push(&mut self, text: &str) {
        self.all.push_str(text);
        self.ends.push(self.all.len());
    }
}

impl<T: AsRef<str>> FromIterator<T> for Texts {
    fn from_iter<I: IntoIterator<Item = T>>(texts: I) -> Self {
        let mut all = Self::default();
        for text in texts {
            all.push(text.as_ref());
        }
        all
    }
}

impl fmt::Debug for Texts {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_list().entries(self.iter()).finish()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn texts_come_back_in_order_empty_ones_too() {
        let list = ["", "a", "", "ż🦀", "b"];
        let texts: Texts = list.iter().collect();
        assert_eq!((texts.len(), texts.is_empty(), Texts::default().is_empty()), (5, false, true));
        assert_eq!(texts.iter().collect::<Vec<_>>(), list);
        assert_eq!((texts.get(3), texts.get(5)), (Some("ż🦀"), None));
        assert_eq!(format!("{texts:?}"), format!("{list:?}"));
        assert_ne!(texts, ["", "a", "", "ż🦀b", ""].iter().collect());
    }
}
