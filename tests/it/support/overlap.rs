//! Witnesses outside Redis: a section that two holders cannot share unseen, and a journal of who entered when.
//!
//! Both live in a directory, so threads and processes can share them, and what they record survives the
//! SIGKILL of any holder.

use std::fmt;
use std::fs::{self, File};
use std::io::{self, ErrorKind, Write};
use std::path::{Path, PathBuf};

/// Two holders were in one section.
#[derive(Debug, PartialEq, Eq)]
pub(crate) struct Overlap {
    pub(crate) inside: String,
    pub(crate) entering: String,
}

impl fmt::Display for Overlap {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{} entered while {} was inside", self.entering, self.inside)
    }
}

/// Being inside; leaves on drop.
#[derive(Debug)]
#[must_use = "the section is left when this is dropped"]
pub(crate) struct Section {
    file: PathBuf,
    holder: String,
}

impl Section {
    /// Enters the section of directory `path`. If somebody else is inside, that is recorded for good.
    pub(crate) fn enter(path: &Path, holder: &str) -> Result<Self, Overlap> {
        fs::create_dir_all(path).expect("a directory for the section");
        let file = path.join("inside");
        match File::create_new(&file) {
            Ok(mut created) => {
                created.write_all(holder.as_bytes()).expect("a place for the holder's name");
                Ok(Self { file, holder: holder.to_owned() })
            }
            Err(error) if error.kind() == ErrorKind::AlreadyExists => {
                // The other may be leaving at this moment, or may not have written its name yet.
                let inside = fs::read_to_string(&file).unwrap_or_default();
                let overlap = Overlap { inside, entering: holder.to_owned() };
                append(&path.join("violations"), &overlap.to_string());
                Err(overlap)
            }
            Err(error) => panic!("{}: {error}", file.display()),
        }
    }

    /// Who is inside.
    pub(crate) fn inside(path: &Path) -> Option<String> {
        fs::read_to_string(path.join("inside")).ok()
    }

    /// Every overlap that was ever seen in the section.
    pub(crate) fn violations(path: &Path) -> Vec<String> {
        lines(&path.join("violations"))
    }

    /// Puts out whoever is inside: for holders that were killed or whose lease is known to be lost.
    pub(crate) fn clear(path: &Path) {
        match fs::remove_file(path.join("inside")) {
            Err(error) if error.kind() != ErrorKind::NotFound => panic!("{}: {error}", path.display()),
            _ => {}
        }
    }
}

impl Drop for Section {
    fn drop(&mut self) {
        // A holder that was put out while it slept must not take its successor's mark away.
        if fs::read_to_string(&self.file).is_ok_and(|inside| inside == self.holder) {
            let _ = fs::remove_file(&self.file);
        }
    }
}

/// One entry of a [`Journal`].
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct Entry {
    pub(crate) fence: u64,
    pub(crate) position: u64,
    pub(crate) holder: String,
}

/// A file to which holders add a line when they enter, in the order in which they do.
#[derive(Clone, Debug)]
pub(crate) struct Journal {
    file: PathBuf,
}

impl Journal {
    pub(crate) fn at(file: impl Into<PathBuf>) -> Self {
        Self { file: file.into() }
    }

    pub(crate) fn write(&self, fence: u64, position: u64, holder: &str) {
        append(&self.file, &format!("{fence} {position} {holder}"));
    }

    /// All entries, oldest first.
    pub(crate) fn read(&self) -> Vec<Entry> {
        let parse = |line: &str| {
            let mut words = line.splitn(3, ' ');
            let mut number = || words.next()?.parse().ok();
            let (fence, position) = (number()?, number()?);
            Some(Entry { fence, position, holder: words.next()?.to_owned() })
        };
        let entry = |line: String| parse(&line).unwrap_or_else(|| panic!("not a journal line: {line:?}"));
        lines(&self.file).into_iter().map(entry).collect()
    }
}

/// Adds a line by one `write` in append mode, which neither another writer nor a SIGKILL can cut in two.
fn append(file: &Path, line: &str) {
    assert!(!line.contains('\n'), "one line only: {line:?}");
    let mut out = File::options().create(true).append(true).open(file).expect("a file to append to");
    out.write_all(format!("{line}\n").as_bytes()).expect("a line appended");
}

fn lines(file: &Path) -> Vec<String> {
    match fs::read_to_string(file) {
        Ok(text) => text.lines().map(str::to_owned).collect(),
        Err(error) if error.kind() == io::ErrorKind::NotFound => Vec::new(),
        Err(error) => panic!("{}: {error}", file.display()),
    }
}
