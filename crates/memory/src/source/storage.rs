//! What kind of device a file is on, and how such a device likes to be read.

use rustix::fd::AsFd;
use std::fs;

/// A kind of device or file system.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub enum Storage {
    /// Flash behind a queue, or a disk of a virtual machine, of which nothing better is known.
    Flash,
    /// A disk that turns.
    Rotational,
    /// A memory card.
    Card,
    /// A file system of another machine.
    Network,
    /// A file system of another process.
    Fuse,
    /// Memory: reading is copying.
    Memory,
}

impl Storage {
    /// The storage of an open file, as far as the system tells.
    pub fn of(file: impl AsFd) -> Storage {
        let kind = rustix::fs::fstatfs(&file).map_or(0, |stat| stat.f_type as u64);
        if let Some(storage) = Storage::of_file_system(kind) {
            return storage;
        }
        let Ok(stat) = rustix::fs::fstat(&file) else { return Storage::Flash };
        let (major, minor) = (rustix::fs::major(stat.st_dev), rustix::fs::minor(stat.st_dev));
        let device = format!("/sys/dev/block/{major}:{minor}");
        let name = fs::canonicalize(&device).map(|path| path.display().to_string()).unwrap_or_default();
        // A partition has no queue of its own; its disk is the folder above.
        let rotational =
            ["queue", "../queue"].iter().find_map(|q| fs::read_to_string(format!("{device}/{q}/rotational")).ok());
        Storage::of_device(&name, rotational.as_deref())
    }

    /// By the magic number of statfs. Source: linux/magic.h and the file systems' own headers.
    fn of_file_system(kind: u64) -> Option<Storage> {
        Some(match kind & 0xffff_ffff {
            0x6969 | 0x517b | 0xff53_4d42 | 0xfe53_4d42 | 0x0102_1997 | 0x00c3_6400 | 0x5346_414f => Storage::Network,
            0x6573_5546 => Storage::Fuse,
            0x0102_1994 | 0x8584_58f6 => Storage::Memory,
            _ => return None,
        })
    }

    /// By the device's path in sysfs and its queue's word.
    fn of_device(path: &str, rotational: Option<&str>) -> Storage {
        let is_card = path.split('/').any(|part| part.starts_with("mmcblk"));
        // Virtual disks say that they turn, whatever is below them.
        let is_virtual = path.split('/').any(|part| part.starts_with("virtio") || part.starts_with("vbd-"));
        match rotational.map(str::trim) {
            _ if is_card => Storage::Card,
            Some("1") if !is_virtual => Storage::Rotational,
            _ => Storage::Flash,
        }
    }

    /// Threads that read at once: what has one head or one small queue is read by one, in order.
    pub fn readers(self) -> usize {
        match self {
            Storage::Rotational | Storage::Card => 1,
            _ => 2,
        }
    }

    /// Whether reads past the page cache are worth trying. Servers and processes behind a file system have caches of their
    /// own, and some give wrong data.
    pub fn likes_direct(self) -> bool {
        matches!(self, Storage::Flash | Storage::Rotational | Storage::Card)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn file_systems_of_others_are_known_by_their_numbers() {
        assert_eq!(Storage::of_file_system(0x6969), Some(Storage::Network));
        assert_eq!(Storage::of_file_system(0xff53_4d42), Some(Storage::Network));
        assert_eq!(Storage::of_file_system(0x6573_5546), Some(Storage::Fuse));
        assert_eq!(Storage::of_file_system(0x0102_1994), Some(Storage::Memory));
        assert_eq!(Storage::of_file_system(0xef53), None);
    }

    #[test]
    fn a_disk_that_turns_and_a_card_have_one_reader_and_a_virtual_disk_is_not_believed() {
        let sata = "/sys/devices/pci0000:00/0000:00:17.0/ata1/host0/target0:0:0/0:0:0:0/block/sda/sda1";
        assert_eq!(Storage::of_device(sata, Some("1\n")), Storage::Rotational);
        assert_eq!(Storage::of_device(sata, Some("0\n")), Storage::Flash);
        assert_eq!(Storage::of_device("/sys/devices/platform/virtio0/block/vda", Some("1\n")), Storage::Flash);
        assert_eq!(Storage::of_device("/sys/devices/mmc0/block/mmcblk0/mmcblk0p2", Some("0\n")), Storage::Card);
        assert_eq!(Storage::of_device("", None), Storage::Flash);
        assert_eq!([Storage::Rotational, Storage::Card].map(Storage::readers), [1, 1]);
        assert!(!Storage::Fuse.likes_direct() && !Storage::Network.likes_direct());
    }

    #[test]
    fn the_storage_of_a_file_can_be_told() {
        let file = fs::File::open("/proc/self/exe").expect("this program");
        assert!(Storage::of(&file).readers() >= 1);
    }
}
