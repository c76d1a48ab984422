//! The manifest of a store: name, arguments and resources of each kernel.

use std::collections::BTreeMap;

use serde::Deserialize;

use super::FORMAT;
use crate::launch::{Choice, Planning, Signature};

/// Most threads that a block may have.
const MAX_THREADS: u32 = 1024;

/// Maximum size in bytes of a structure argument, and maximum number of arguments.
const MAX_STRUCTURE: usize = 4096;
const MAX_PARAMETERS: usize = 128;

/// An argument of a kernel, by its letter in the manifest.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub enum Parameter {
    /// A device address.
    Pointer,
    /// An integer of 32 bits.
    I32,
    /// An integer of 64 bits.
    I64,
    /// A float of 32 bits.
    F32,
    /// A float of 64 bits.
    F64,
    /// A null pointer that the launch adds by itself.
    Null,
    /// The kernel's only argument: a structure of this many bytes.
    Structure(usize),
    /// All arguments of the kernel as a block of so many bytes: AMD's assembly kernels.
    Block(usize),
}

/// The manifest entry of one kernel.
#[derive(Clone, Debug)]
#[non_exhaustive]
pub struct Kernel {
    /// Name of the function in the code object.
    pub symbol: String,
    /// Its arguments, in order.
    pub parameters: Vec<Parameter>,
    /// Dynamic shared memory of a block, in bytes.
    pub shared: u32,
    /// Threads of a block.
    pub threads: u32,
    /// Rows of queries and of keys in a tile of an attention kernel; 0 for kernels without.
    pub block_m: usize,
    /// See `block_m`.
    pub block_n: usize,
    /// Dies of the GPU to which programs go in turn.
    pub num_xcds: usize,
    /// Digest of the code object, in hexadecimal.
    pub sha256: String,
    pub(super) group: String,
    pub(super) offset: usize,
    pub(super) size: usize,
    pub(super) code: Option<Code>,
    /// The place of its arguments' names in `Manifest::signatures`; None for a kernel that takes a structure.
    pub(super) signature: Option<usize>,
}

/// Code that the store of another target holds, in the group of the same name: where it belongs in the code object, and
/// where it lies in that group.
#[derive(Clone, Copy, Debug, Deserialize)]
pub(super) struct Code {
    pub at: usize,
    pub offset: usize,
    pub size: usize,
}

/// Major and minor number of a version of HIP.
pub type Version = (u32, u32);

/// Which GPUs load the code objects of a store.
#[derive(Clone, Debug, Deserialize)]
pub(super) struct Facts {
    pub gpus: Vec<String>,
    /// The first HIP that loads them; None for every HIP.
    pub min_hip: Option<Version>,
    /// Compute units that HIP counts as one multiprocessor: the two of a work group processor on RDNA.
    #[serde(default = "one")]
    pub multiprocessor_units: usize,
}

const fn one() -> usize {
    1
}

/// A manifest whose entries have been checked.
#[derive(Debug)]
pub(super) struct Manifest {
    /// By name.
    pub kernels: BTreeMap<String, Kernel>,
    /// The target whose store has code of these kernels.
    pub base: Option<String>,
    /// Digest of the planner library of Composable Kernel's launches, in hexadecimal; None without such kernels.
    pub planner: Option<String>,
    pub facts: Facts,
    pub choice: Choice,
    pub planning: Planning,
    pub signatures: Vec<Signature>,
}

/// Only the format number, so that the error for another format can name it.
#[derive(Deserialize)]
struct Head {
    format: u64,
}

#[derive(Deserialize)]
struct Content {
    base: Option<String>,
    planner: Option<String>,
    facts: Facts,
    choice: Choice,
    planning: Planning,
    signatures: Vec<String>,
    #[serde(default)]
    kernels: BTreeMap<String, Entry>,
}

#[derive(Deserialize)]
struct Entry {
    symbol: String,
    params: String,
    shared: u32,
    threads: u32,
    sha256: String,
    group: String,
    offset: usize,
    size: usize,
    code: Option<Code>,
    signature: Option<usize>,
    #[serde(default)]
    constants: Constants,
}

#[derive(Default, Deserialize)]
struct Constants {
    #[serde(rename = "BLOCK_M", default)]
    block_m: usize,
    #[serde(rename = "BLOCK_N", default)]
    block_n: usize,
    #[serde(rename = "NUM_XCDS")]
    num_xcds: Option<usize>,
}

/// Reads a manifest. The error is the reason to refuse it.
pub(super) fn parse(text: &[u8]) -> Result<Manifest, String> {
    let broken = |error: serde_json::Error| format!("manifest.json cannot be read: {error}");
    let head: Head = serde_json::from_slice(text).map_err(broken)?;
    if head.format != FORMAT {
        return Err(format!(
            "it has format {}, this crate reads {FORMAT}: build the store with the version of the repository that the \
             crate is from",
            head.format
        ));
    }
    let Content { base, planner, facts, choice, planning, signatures, kernels } =
        serde_json::from_slice(text).map_err(broken)?;
    let signatures: Vec<Signature> = signatures.iter().map(|names| Signature::parse(names)).collect();
    let kernels: Result<_, String> = kernels
        .into_iter()
        .map(|(name, entry)| {
            let parameters = parameters(&entry.params).map_err(|reason| format!("kernel {name}: {reason}"))?;
            if !(1..=MAX_THREADS).contains(&entry.threads) {
                return Err(format!("kernel {name}: threads is {}, wanted 1 to {MAX_THREADS}", entry.threads));
            }
            if entry.symbol.is_empty() || entry.symbol.contains('\0') {
                return Err(format!("kernel {name}: symbol {:?} is empty or has a null character", entry.symbol));
            }
            if let Some(number) = entry.signature {
                let named = signatures.get(number).map_or(0, |signature| signature.names().count());
                let taken = parameters.iter().filter(|one| **one != Parameter::Null).count();
                if named != taken {
                    return Err(format!("kernel {name} takes {taken} arguments, its signature {number} names {named}"));
                }
            }
            let kernel = Kernel {
                symbol: entry.symbol,
                parameters,
                shared: entry.shared,
                threads: entry.threads,
                block_m: entry.constants.block_m,
                block_n: entry.constants.block_n,
                num_xcds: entry.constants.num_xcds.unwrap_or(1),
                sha256: entry.sha256,
                group: entry.group,
                offset: entry.offset,
                size: entry.size,
                code: entry.code,
                signature: entry.signature,
            };
            Ok((name, kernel))
        })
        .collect();
    Ok(Manifest { kernels: kernels?, base, planner, facts, choice, planning, signatures })
}

/// From letters, or from B or K and a number of bytes, to parameters.
fn parameters(letters: &str) -> Result<Vec<Parameter>, String> {
    for (letter, one) in [('B', Parameter::Structure as fn(usize) -> Parameter), ('K', Parameter::Block)] {
        if let Some(size) = letters.strip_prefix(letter) {
            return match size.parse() {
                Ok(size) if (1..=MAX_STRUCTURE).contains(&size) => Ok(vec![one(size)]),
                _ => Err(format!("params {letters:?}, {letter} wants a number of bytes from 1 to {MAX_STRUCTURE}")),
            };
        }
    }
    if letters.len() > MAX_PARAMETERS {
        return Err(format!("{} params, at most {MAX_PARAMETERS}", letters.len()));
    }
    let mut found = Vec::with_capacity(letters.len());
    for letter in letters.chars() {
        let parameter = match letter {
            'P' => Parameter::Pointer,
            'i' => Parameter::I32,
            'I' => Parameter::I64,
            'f' => Parameter::F32,
            'd' => Parameter::F64,
            '0' => Parameter::Null,
            _ => return Err(format!("params {letters:?}, letter {letter:?} is none of P i I f d 0")),
        };
        if found.last() == Some(&Parameter::Null) && parameter != Parameter::Null {
            return Err(format!("params {letters:?}, a 0 before {letter:?}: they come last"));
        }
        found.push(parameter);
    }
    Ok(found)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn letters_become_parameters() {
        assert_eq!(parameters("B200"), Ok(vec![Parameter::Structure(200)]));
        assert_eq!(parameters("Pf0"), Ok(vec![Parameter::Pointer, Parameter::F32, Parameter::Null]));
        assert_eq!(parameters("K512"), Ok(vec![Parameter::Block(512)]));
        for wrong in ["B0", "B", "K", "K0", "B-1", "Px", "0P", "B5000"] {
            assert!(parameters(wrong).is_err(), "{wrong}");
        }
        assert!(parameters(&"P".repeat(MAX_PARAMETERS + 1)).is_err());
    }
}
