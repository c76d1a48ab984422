# nix-build -E '(import <nixpkgs> {}).callPackage ./libflash_attn_rocm/package.nix {}', from the root of the repository.
{ lib, rustPlatform, stdenv, cargo }:

stdenv.mkDerivation {
  pname = "libflash_attn_rocm";
  version = "0.2.0";
  src = lib.fileset.toSource {
    root = ../.;
    fileset = lib.fileset.unions [ ./. ../candle-flash-rocm ];
  };
  sourceRoot = "source/libflash_attn_rocm";
  cargoDeps = rustPlatform.importCargoLock { lockFile = ./Cargo.lock; };
  nativeBuildInputs = [ cargo rustPlatform.cargoSetupHook ];
  makeFlags = [ "PREFIX=$(out)" ];
  meta = {
    description = "Flash attention on AMD GPUs for programs in C and other languages";
    license = lib.licenses.bsd3;
    platforms = [ "x86_64-linux" ];
  };
}
